"""The bar of a feed says how far it is, on the terminals there are, and nothing runs into it."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

import pytest

from sparkdl.control.rows import CallShape
from sparkdl.core.settings import is_submitted
from sparkdl.driver.feeds.calls import Call, FeedRequest
from sparkdl.driver.show import progress
from sparkdl.driver.show.progress import FeedBar, print_beside


@dataclass
class Terminal:
    """A terminal of 100 columns; `stream` writes to it."""

    fd: int
    stream: TextIO

    def shown(self) -> str:
        """Return all that has been written to it so far."""
        self.stream.flush()
        data = b""
        while True:
            try:
                data += os.read(self.fd, 65536)
            except BlockingIOError:
                return data.decode()

    def lines(self) -> list[str]:
        """Return what stands on it: each carriage return begins the line anew."""
        lines = []
        for line in self.shown().replace("\r\n", "\n").split("\n"):
            seen = ""
            for part in line.split("\r"):
                seen = part + seen[len(part) :]
            lines.append(seen.rstrip())
        return lines


@contextmanager
def a_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """Have this process speak to a terminal: in the test itself, for pytest does so before."""
    main, side = pty.openpty()
    os.set_blocking(main, False)
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    with open(side, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(progress, "PERIOD_S", 0.0)
        yield Terminal(main, stream)
    os.close(main)


def test_bar_has_a_total_the_time_left_and_the_loss_as_soon_as_they_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    total = [0]
    with (
        a_terminal(monkeypatch) as terminal,
        FeedBar("input", 3, None, lambda: total[0]) as bar,
    ):
        bar.update(1000, {})
        bar.update(1100, {"loss": 0.25})
        before = terminal.shown().split("\r")[-1]
        assert before.startswith("feed 'input', 3 epochs: 100 rows [")
        assert "loss=0.25" in before
        total[0] = 300
        bar.update(1150, {"loss": 0.125}, is_last=True)
        after = terminal.shown().split("\r")[-1]
        assert re.search(r"50%\|.*\| 150/300 \[\d\d:\d\d<\d\d:\d\d, .* rows/s, loss=0.125\]", after)


def test_log_lines_and_lines_of_nodes_stand_beside_the_bar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = logging.getLogger()
    with a_terminal(monkeypatch) as terminal:
        handler = logging.StreamHandler(terminal.stream)
        root.addHandler(handler)
        try:
            with FeedBar("input", 1, None, lambda: 100) as bar:
                bar.update(0, {})
                bar.update(50, {})
                root.warning("of the driver")
                print_beside("[worker:0] of a node")
                bar.update(100, {}, is_last=True)
            assert handler.stream is terminal.stream
        finally:
            root.removeHandler(handler)
        first, second, last, end = terminal.lines()
    assert (first, second, end) == ("of the driver", "[worker:0] of a node", "")
    assert "100/100" in last


def test_bars_of_others_are_hidden_before_each_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    with a_terminal(monkeypatch) as terminal:
        with FeedBar("input", 1, None, hide_others=lambda: seen.append(terminal.shown())) as bar:
            bar.update(0, {})
            bar.update(5, {}, is_last=True)
            assert len(seen) == 2
            assert "5 rows" not in "".join(seen)
            assert "5 rows" in terminal.shown()
        assert len(seen) == 3


@pytest.mark.parametrize("is_shown", [None, False])
def test_without_a_terminal_nobody_draws_and_no_other_bar_is_hidden(
    monkeypatch: pytest.MonkeyPatch, is_shown: bool | None
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)

    def hide() -> None:
        raise AssertionError("the other bar is the only one there is")

    with FeedBar("input", 1, is_shown, hide_others=hide) as bar:
        bar.update(5, {}, is_last=True)
        assert bar.period_s is None
    assert stream.getvalue() == ""


def test_program_of_spark_submit_is_known_by_its_gateway() -> None:
    assert is_submitted({"PYSPARK_GATEWAY_PORT": "40000"})
    assert not is_submitted({"PATH": "/bin"})


def test_rows_of_a_call_are_known_when_those_of_all_partitions_are() -> None:
    call = Call(0, FeedRequest(None, epochs=3), "run", CallShape(2, {0: 10, 1: 20}))
    assert call.rows_of(call.left()) == 90
    call.take({1: {0: ((0, 10),), 1: ((0, 5),)}})
    assert call.rows_of(call.left()) == 15 + 30
    assert Call(0, FeedRequest(None), "run", CallShape(2, {0: 10})).rows_of([]) == 0
