"""An inference partition gets one result per row, in order, or an error that says what is wrong."""

from __future__ import annotations

from hypothesis import given, strategies as st

from sparkdl.feed.store.session import Exchange, Session
from tests.doubles.feeds import SOON_S, Running


@given(st.lists(st.tuples(st.sampled_from(["send", "answer", "wait"]), st.integers(1, 5))))
def test_session_knows_what_is_owed_and_since_when(steps: list[tuple[str, int]]) -> None:
    """Against all rows, each with the time at which it was sent or the one before was answered."""
    session, owed, now_s, moved_s = Session(), 0, 0.0, 0.0
    for step, count in steps:
        if step == "send":
            moved_s = moved_s if owed else now_s
            session.send(count, now_s)
            owed += count
        elif step == "answer" and owed:
            session.answer(min(count, owed), now_s)
            owed, moved_s = owed - min(count, owed), now_s
        elif step == "wait":
            now_s += count
        assert session.owed == owed
        assert session.owed_s(now_s) == (now_s - moved_s if owed else 0.0)
        assert not session.is_over
    session.is_through = True
    assert session.is_over == (not owed)


def test_time_until_more_rows_come_does_not_count() -> None:
    now_s = 0.0
    exchange = Exchange("0.a", lambda: now_s)
    exchange.expect(1)
    exchange.add(b"first", 1)
    results = exchange.results(SOON_S)
    assert next(results) == b"first"
    now_s += 2 * SOON_S  # Spark takes its time
    exchange.expect(1)
    waiting = Running(lambda: next(results))
    exchange.add(b"second", 1)
    assert waiting.result() == b"second"
    exchange.finish_input()
    assert list(results) == []


def test_results_that_are_all_here_count_whatever_becomes_of_the_node() -> None:
    exchange = Exchange("0.a")
    exchange.expect(1)
    exchange.finish_input()
    exchange.add(b"only", 1)
    exchange.fail("the node is gone")
    assert list(exchange.results(SOON_S)) == [b"only"]
