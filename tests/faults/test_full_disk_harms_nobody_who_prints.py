"""The local disk takes nothing more: a node prints as before, for what it prints needs no disk."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from sparkdl.node.context import NodeContext
from tests.doubles.nodes import SOON_S, launch


def print_much(args: str, ctx: NodeContext) -> str:
    """Print beyond all pipes and limits, on a disk that takes no byte more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    for i in range(30_000):
        print(f"{i:05}" + "x" * 94)
    print("to stderr", file=sys.stderr)
    try:
        Path(args).write_text("is there room?")
    except OSError as error:
        return str(error.strerror)
    finally:  # who measures coverage writes a file at the end
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "the disk was not full"


def test_full_disk_harms_nobody_who_prints(tmp_path: Path) -> None:
    with launch(print_much, str(tmp_path / "file")) as cluster:
        assert cluster.results(SOON_S) == ["File too large"] * 2
    assert cluster.logs(1, lines=2) == ["29999" + "x" * 94, "to stderr"]


def fail_after_printing(args: None, ctx: NodeContext) -> None:
    print_much("/nowhere", ctx)
    raise ValueError("of another cause")


def test_full_disk_hides_no_other_failure() -> None:
    with (
        pytest.raises(Exception, match="raised ValueError: of another cause") as caught,
        launch(fail_after_printing, nodes=1) as cluster,
    ):
        cluster.wait(SOON_S)
    told: Any = caught.value
    assert told.root_cause.log_tail[-1] == "to stderr"
