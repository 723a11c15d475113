"""What a program shows of a cluster: a bar of progress, its report, for whom it prints."""

from __future__ import annotations

import fcntl
import io
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

from sparkdl.driver.options import Observe
from sparkdl.driver.show import FeedBar, has_audience, is_submitted, printing
from tests.doubles.programs import output_of


@dataclass
class Terminal:
    """A terminal of 100 columns; `stream` writes to it."""

    fd: int
    stream: TextIO

    def shown(self) -> str:
        self.stream.flush()
        data = b""
        while True:
            try:
                data += os.read(self.fd, 65536)
            except BlockingIOError:
                return data.decode()


@contextmanager
def a_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """Have this process speak to a terminal: in the test itself, for pytest does so before."""
    main, side = pty.openpty()
    os.set_blocking(main, False)
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    with open(side, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "stdout", stream)
        yield Terminal(main, stream)
    os.close(main)


def test_bar_has_a_total_the_time_left_and_the_loss_as_soon_as_they_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    total = [0]
    with (
        a_terminal(monkeypatch) as terminal,
        FeedBar("input", 3, None, lambda: total[0], period_s=0.0) as bar,
    ):
        bar.update(0, {})
        bar.update(100, {"loss": 0.25})
        before = terminal.shown().split("\r")[-1]
        assert before.startswith("feed 'input', 3 epochs: 100 rows [")
        assert "loss=0.25" in before
        total[0] = 300
        bar.update(150, {"loss": 0.125}, is_last=True)
        after = terminal.shown().split("\r")[-1]
        assert re.search(r"50%\|.*\| 150/300 \[\d\d:\d\d<\d\d:\d\d, .* rows/s, loss=0.125\]", after)


@pytest.mark.parametrize("is_shown", [None, False])
def test_no_terminal_no_drawing(monkeypatch: pytest.MonkeyPatch, is_shown: bool | None) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)

    with FeedBar("input", 1, is_shown) as bar:
        bar.update(5, {}, is_last=True)
    assert stream.getvalue() == ""


def test_program_of_spark_submit_is_known_by_its_parent_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "40000")  # as under YARN's ApplicationMaster
    assert not is_submitted()
    assert not has_audience()
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT")  # as over Spark Connect
    program = "from sparkdl.driver.show import has_audience; print(has_audience())"
    submit = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[2]])"
    for main, answer in (
        ("org.apache.spark.deploy.SparkSubmit", "True"),
        ("org.apache.spark.deploy.yarn.ApplicationMaster", "False"),
    ):
        assert output_of(sys.executable, "-c", submit, main, program).strip() == answer


@pytest.mark.parametrize(
    ("observe", "is_terminal", "whose"),
    [
        (Observe(), True, "first"),
        (Observe(), False, "none"),
        (Observe(log_to_driver=False), True, "none"),
        (Observe(log_to_driver=True), False, "all"),
        (Observe(on_log=print), False, "all"),
    ],
)
def test_first_node_alone_is_printed_by_default_where_a_person_reads_it(
    monkeypatch: pytest.MonkeyPatch, observe: Observe, is_terminal: bool, whose: str
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    assert printing(observe) == whose
