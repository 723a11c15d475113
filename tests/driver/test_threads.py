"""A wait hears of an interrupt, whenever that has come."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any

import pytest

from sparkdl.core.deadline import Deadline
from sparkdl.driver.threads import Changed, Outcome, begin


def changed_wait(
    is_over: threading.Event, deadline: Deadline
) -> tuple[Changed, Callable[[], object]]:
    changed = Changed()
    return changed, lambda: changed.wait_for(is_over.is_set, deadline)


def job_wait(is_over: threading.Event, deadline: Deadline) -> tuple[Changed, Callable[[], object]]:
    """Return the wait for a future: of a feed, the trials of a search, what MLflow is told."""

    def thread(run: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(target=run, name=name)

    outcome = begin(partial(is_over.wait, deadline.remaining_s), "job", thread)
    return outcome._changed, outcome.result


@pytest.mark.parametrize("begin_wait", [changed_wait, job_wait])
def test_wait_hears_of_an_interrupt_that_did_not_wake_it(begin_wait: Any) -> None:
    """As when it came between the last step before the wait and the wait: the thread sleeps on."""
    is_over, deadline = threading.Event(), Deadline.after(20)
    changed, wait = begin_wait(is_over, deadline)

    def interrupt() -> None:
        while not changed._waiters:
            is_over.wait(0.01)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # the main thread is not woken

    other = threading.Thread(target=interrupt)
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            wait()
        assert not deadline.has_passed
    finally:
        is_over.set()
        other.join()


def test_result_that_does_not_come_in_time_is_a_timeout_and_comes_later() -> None:
    outcome: Outcome[int] = Outcome()
    with pytest.raises(FutureTimeoutError):
        outcome.result(0.0)
    assert not outcome.cancel()
    outcome.of(lambda: 7)
    assert outcome.result() == outcome.result(0.0) == 7
