"""What a process does is kept in bounded rings, costs nothing unasked, and never fails anybody."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from sparkdl.core import trace
from sparkdl.core.trace import Ring, Span

NEVER_S = 3600.0


class Taker:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.dropped = 0
        self.threads: dict[int, str] = {}

    def __call__(self, spans: tuple[Span, ...], dropped: int, threads: dict[int, str]) -> None:
        self.spans += spans
        self.dropped += dropped
        self.threads |= threads


@pytest.fixture
def taker() -> Iterator[Taker]:
    kept = Taker()
    trace.start(kept, NEVER_S)
    yield kept
    trace.stop()


def test_ring_keeps_the_last_spans_and_counts_the_others() -> None:
    ring = Ring(3)
    for number in range(5):
        ring.add(Span("user", str(number), 1, number, 1))
    spans, dropped = ring.take()
    assert [span.name for span in spans] == ["2", "3", "4"]
    assert dropped == 2
    assert ring.take() == ((), 0)


def test_spans_are_passed_on_at_the_end_with_the_names_of_their_threads(taker: Taker) -> None:
    with trace.span("user", "outer", None, rows=3), trace.span("user", "inner"):
        pass
    trace.stop()
    inner, outer = taker.spans
    assert (inner.name, outer.name, outer.args) == ("inner", "outer", {"rows": 3})
    assert outer.start_us <= inner.start_us
    assert inner.start_us + inner.duration_us <= outer.start_us + outer.duration_us
    assert taker.threads[int(outer.track)] == threading.current_thread().name
    with trace.span("user", "late"):
        pass
    assert len(taker.spans) == 2


def test_nothing_is_kept_while_nobody_asks() -> None:
    assert not trace.is_on()
    assert trace.span("user", "one") is trace.span("user", "other")


def test_span_that_is_left_by_an_error_says_so(taker: Taker) -> None:
    with pytest.raises(ValueError, match="bad"), trace.span("user", "fails"):
        raise ValueError("bad")
    trace.stop()
    assert taker.spans[0].args == {"error": "ValueError"}


def test_whatever_is_told_with_a_span_becomes_what_json_can_carry(taker: Taker) -> None:
    class Rude:
        def __str__(self) -> str:
            raise ValueError("no")

    about: dict[str, Any] = {
        "nan": float("nan"),
        "big": 1 << 80,
        "rude": Rude(),
        "cut": "\ud800",
        "long": "x" * 999,
    }
    with trace.span("user", "a\ud800", None, **about):
        pass
    trace.stop()
    (span,) = taker.spans
    assert span.args["nan"] == "nan"
    assert span.args["big"] == str(1 << 80)
    assert span.args["rude"] == "<Rude: ValueError>"
    assert span.args["cut"] == "?"
    assert len(str(span.args["long"])) == 200
    assert span.name == "a?"


def test_taker_that_fails_is_asked_no_more_and_harms_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[int] = []

    def fail(spans: tuple[Span, ...], dropped: int, threads: dict[int, str]) -> None:
        asked.append(len(spans))
        raise OSError("no such pipe")

    pump = trace.start(fail, 0.001)
    while not asked:
        trace.add("user", "one", 0)
    trace.add("user", "two", 0)
    trace.stop(pump)
    assert len(asked) == 1
    assert (
        "The timeline of this process ends here, and the training continues: no such pipe"
        in caplog.text
    )


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_process_that_is_forked_keeps_nothing(taker: Taker) -> None:
    assert trace.is_on()
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    forked = context.Process(target=lambda: theirs.send(trace.is_on()))
    forked.start()
    assert mine.recv() is False
    forked.join()
    for end in (mine, theirs, forked):
        end.close()
