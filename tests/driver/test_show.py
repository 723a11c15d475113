"""What a cluster shows of itself: a table in all its states, a bar of progress."""

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
from sparkdl.driver.events import Changed, Event, FeedColumns, Launched, Place, Problem, Sampled
from sparkdl.driver.feeds.coverage import Call, FeedRequest
from sparkdl.driver.feeds.report import FeedReport
from sparkdl.driver.history import History, folded
from sparkdl.driver.show import FeedBar, as_html, has_audience, is_submitted, print_beside
from tests.doubles.programs import output_of
from tests.doubles.screen import on_screen

NODES = ("ps:0", "worker:0", "worker:1")
PLACES = (Place(1, 0, "10.0.0.1"), Place(2, 1, "10.0.0.1"), Place(0, 2, "10.0.0.1"))


def history(*events: Event, nodes: tuple[str, ...] = NODES) -> History:
    return folded([Launched("c0ffee", 0.0, "plain", nodes, True), *events])


def running(places: tuple[Place, ...] = PLACES) -> Changed:
    return Changed("c0ffee", 1.0, "running", 0, places, status="Running")


def test_table_has_a_line_for_each_node_and_a_column_for_each_feed() -> None:
    feeds = {
        "a&b": FeedColumns([0, 0, 1], [0, 0, 1], [0] * 3, [0] * 3),
        "input": FeedColumns([0, 12_345, 0], [0, 12_345, 0], [0, 10, 0], [0, 1, 0]),
    }
    states = ["preparing", "in map_fun", "in map_fun"]
    sample = Sampled("c0ffee", 2.0, states, [0, 4711, 0], [-1] * 3, {}, feeds)
    html = as_html(history(running(), sample), "http://h:1/?a&b")
    assert "<b>Cluster c0ffee: Running</b> (3 nodes, plain, fed by this driver)" in html
    lines = html.split("<tr>")[1:]
    assert len(lines) == 1 + 3
    assert "feed &#x27;a&amp;b&#x27;</th>" in lines[0]
    assert lines[1].count("<td") == 7
    for cell in ("worker:0", "0", "10.0.0.1", "4711", "12,345 rows, 10 steps, 1 epoch", ""):
        assert f">{cell}</td>" in lines[1]
    assert 'href="http://h:1/?a&amp;b"' in html


def test_table_tells_reports_and_who_is_waited_for() -> None:
    waits: dict[str, list[float | None]] = {"rows": [None, 0.5, 0.0], "lag": [None, 0.0, 0.4]}
    sample = Sampled(
        *("c0ffee", 2.0, ["in map_fun"] * 3, [1] * 3, [-1, 1234, 7]),
        {"loss": [None, 0.123456, None]},
        waits=waits,
    )
    html = as_html(history(running(), sample))
    for cell in ("1,234, loss 0.1235", "rows 50%", "awaited by the others"):
        assert f">{cell}</td>" in html


def test_table_of_a_failed_cluster_names_the_root_cause_and_nothing_of_it_is_html() -> None:
    problem = Problem("worker:0", "worker:0 raised ValueError: <b>no</b>")
    failing = Changed("c0ffee", 2.0, "failing", 0, (), (problem,))
    assert "<pre>" not in as_html(history(running(), failing))
    html = as_html(history(running(), failing, Changed("c0ffee", 3.0, "failed", 0, (), (problem,))))
    assert "<pre>worker:0 raised ValueError: &lt;b&gt;no&lt;/b&gt;</pre>" in html
    assert "<b>no" not in html
    stopped = Changed("c0ffee", 3.0, "stopped", 0, (), (Problem("", "LaunchError: <cancelled>"),))
    assert "LaunchError: &lt;cancelled&gt;" in as_html(history(stopped))


def test_table_of_a_thousand_nodes_shows_a_few_those_that_differ_and_counts() -> None:
    nodes = tuple(f"worker:{n}" for n in range(1000))
    places = tuple(Place(n, n, "10.0.0.1") for n in range(1000))
    states = ["in map_fun"] * 1000
    states[500], states[600] = "preparing", "returned"
    steps = [7 if n == 700 else 20 for n in range(1000)]
    sample = Sampled("c0ffee", 2.0, states, [1] * 1000, steps)
    html = as_html(history(running(places), sample, nodes=nodes))
    assert "998 in map_fun, 1 " in html
    assert html.count("<tr>") < 20
    for node in (0, 999, 500, 600, 700):
        assert f">worker:{node}</td>" in html


def test_report_of_a_thousand_nodes_is_a_line() -> None:
    rows = {f"worker:{n}": 256 + (n == 3) for n in range(1000)}
    text = repr(FeedReport(1, rows, {"worker:0": 1}))
    assert "'worker:4': 256 and 995 more, 256 to 257 each}, steps={'worker:0': 1}" in text
    assert len(text) < 400


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
        """Return what stands on it."""
        return on_screen(self.shown())


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


def test_log_lines_and_lines_of_nodes_stand_beside_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    with a_terminal(monkeypatch) as terminal:
        handler = logging.StreamHandler(terminal.stream)
        root.addHandler(handler)
        try:
            with FeedBar("input", 1, None, lambda: 100, period_s=0.0) as bar:
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


def test_bar_goes_back_to_the_checkpoint_at_a_restart_and_the_warning_has_its_own_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    restarted = logging.makeLogRecord({"levelno": logging.WARNING, "msg": "nodes begin anew"})
    with a_terminal(monkeypatch) as terminal:
        stock = logging.lastResort
        with FeedBar("input", 1, None, lambda: 1000, period_s=0.0) as bar:
            for rows in (0, 700):
                bar.update(rows, {})
            assert logging.lastResort is not None
            logging.lastResort.handle(restarted)  # as where logging is not set up
            for rows in (600, 900):
                bar.update(rows, {}, is_last=True)
            assert bar._bar.format_dict["initial"] == 0
        assert logging.lastResort is stock
        warning, last, _ = terminal.lines()
    assert warning == "nodes begin anew"
    assert "90%" in last
    assert "900/1000" in last


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


def test_person_at_a_terminal_reads_what_the_program_prints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with a_terminal(monkeypatch):
        assert has_audience()


def test_rows_of_a_call_are_known_when_those_of_all_partitions_are() -> None:
    call = Call(0, FeedRequest(None, epochs=3), "run", CallShape(2, {0: 10, 1: 20}))
    assert call.rows_of(call.left()) == 90
    call.cover({1: {0: ((0, 10),), 1: ((0, 5),)}})
    assert call.rows_of(call.left()) == 15 + 30
    assert Call(0, FeedRequest(None), "run", CallShape(2, {0: 10})).rows_of([]) == 0
