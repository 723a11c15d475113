"""Whether nodes want more, loops that were left early, and what names files."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.control.messages import ReadShare
from sparkdl.control.rows import DataFile, Share, Storage
from sparkdl.core.errors import ConfigError
from sparkdl.driver.feeds import feeds
from sparkdl.driver.feeds.report import check_size
from sparkdl.node.context import NodeContext
from tests.doubles.meetings import STEP_S, parts
from tests.doubles.nodes import SOON_S, launch
from tests.doubles.until import until


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


def order_of(files: int) -> ReadShare:
    """Return an order to read so many files, whose names take 1 kB each."""
    named = tuple(DataFile("x" * 1000, 1) for _ in range(files))
    return ReadShare("input", 0, Share(Storage("file://"), b"", (), named, ()))


def test_share_that_is_too_large_for_a_message_says_what_to_do() -> None:
    check_size(order_of(10_000))
    with pytest.raises(
        ConfigError, match=r"17000 files, needs a message of .* Write fewer and larger files"
    ):
        check_size(order_of(17_000))


def test_look_at_files_ends_with_the_call_that_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(feeds, "_SILENT_S", 0.1)
    over, caller = threading.Event(), threading.get_ident()

    def look(is_wanted: Callable[[], bool]) -> None:
        assert until(lambda: "still reading the footers" in caplog.text)
        signal.pthread_kill(caller, signal.SIGINT)
        assert until(lambda: not is_wanted())
        over.set()

    own: Any = SimpleNamespace(_executor=SimpleNamespace(thread=thread))
    with pytest.raises(KeyboardInterrupt):
        feeds.Feeds._looked_up(own, "x", look)
    assert over.wait(SOON_S)
