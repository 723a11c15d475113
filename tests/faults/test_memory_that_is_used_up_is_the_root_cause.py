"""A node gets no more memory (RLIMIT_AS): it is named, with the line that asked for it."""

from __future__ import annotations

import resource
from typing import Any

import psutil
import pytest

from sparkdl.core.errors import NodeFailedError
from sparkdl.node.context import NodeContext
from tests.doubles.map_funs import hang
from tests.doubles.nodes import SOON_S, launch


def use_it_up(args: Any, ctx: NodeContext) -> None:
    if ctx.rank != 1:
        hang(args, ctx)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    more_nbytes = psutil.Process().memory_info().vms + (256 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (more_nbytes, hard))
    kept = []
    while True:
        kept.append(bytearray(1 << 25))


def test_memory_that_is_used_up_is_the_root_cause() -> None:
    with pytest.raises(NodeFailedError) as caught, launch(use_it_up) as cluster:
        cluster.wait(SOON_S)
    cause = caught.value.root_cause
    assert (cause.node, cause.kind) == ("worker:1", "exception")
    assert cause.exception_type == "builtins.MemoryError"
    assert "kept.append" in cause.traceback
