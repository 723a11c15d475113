"""What a node prints finds no room: the node says so, although its log cannot."""

from __future__ import annotations

import resource
from typing import Any

import pytest

from sparkdl.core.errors import NodeFailedError
from sparkdl.node.context import NodeContext
from tests.doubles.map_funs import hang
from tests.doubles.nodes import SOON_S, launch


def print_too_much(args: Any, ctx: NodeContext) -> None:
    if ctx.rank != 1:
        hang(args, ctx)
    print("before", flush=True)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    for _ in range(1000):
        print("x" * 99)


def test_full_disk_for_the_log_is_the_root_cause() -> None:
    with pytest.raises(NodeFailedError) as caught, launch(print_too_much) as cluster:
        cluster.wait(SOON_S)
    cause = caught.value.root_cause
    assert cause.node == "worker:1"
    assert "File too large" in str(caught.value)
    assert 'print("x" * 99)' in cause.traceback
