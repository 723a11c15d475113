"""Whether nodes want more, loops that were left early, and what names files."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from sparkdl.control.rows import DataFile, Storage
from sparkdl.core.errors import ConfigError
from sparkdl.driver.feeds import feeds
from sparkdl.node.context import NodeContext
from sparkdl.storage.parquet.source import ParquetSource
from tests.doubles.meetings import STEP_S, parts
from tests.doubles.nodes import SOON_S, launch


def thread(run: Any, name: str) -> threading.Thread:
    return threading.Thread(target=run, name=name, daemon=True)


def leave_early(_args: Any, ctx: NodeContext) -> list[list[int]]:
    """Read two batches of an epoch, three times."""
    loops = []
    for _ in range(3):
        batches = zip(range(2), ctx.batches(8, ["x"], shuffle=True), strict=False)
        loops.append([x for _, batch in batches for x in batch["x"].tolist()])
    return loops


def test_report_counts_all_rows_of_loops_that_were_left_early() -> None:
    with launch(leave_early, nodes=1) as cluster:
        report = cluster.feed(parts(100), 1, "input", STEP_S)
        (loops,) = cluster.results(SOON_S)
    assert [len(loop) for loop in loops] == [16, 16, 16]
    assert len({str(loop) for loop in loops}) == 3
    assert (report.rows_used, report.rows_again, report.rows_unused) == (16, 32, 84)


def test_share_that_is_too_large_for_a_message_says_what_to_do() -> None:
    named = tuple(DataFile("x" * 1000, 1) for _ in range(10_000))
    files = ParquetSource(Storage("file://"), pa.schema([]), named, ((1,),) * 10_000)
    files.check_fits(2)
    with pytest.raises(ConfigError, match=r"10000 files with .* Write fewer and larger files"):
        files.check_fits(1)


def test_interrupt_ends_the_wait_for_a_look_at_files() -> None:
    over, caller = threading.Event(), threading.get_ident()

    def look() -> Any:
        signal.pthread_kill(caller, signal.SIGINT)
        over.wait(SOON_S)

    own: Any = SimpleNamespace(_executor=SimpleNamespace(thread=thread))
    with pytest.raises(KeyboardInterrupt):
        feeds.Feeds._looked_up(own, "x", look, nodes=1)
    over.set()
