"""A wait hears of an interrupt, whenever that has come."""

from __future__ import annotations

import signal
import threading

import pytest

from sparkdl.core.deadline import Deadline
from sparkdl.driver.threads import Changed


def test_wait_hears_of_an_interrupt_that_did_not_wake_it() -> None:
    """As when it came between the last step before the wait and the wait: the thread sleeps on."""
    changed, is_over, deadline = Changed(), threading.Event(), Deadline.after(20)

    def interrupt() -> None:
        while not changed._waiters:
            is_over.wait(0.01)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # the main thread is not woken

    other = threading.Thread(target=interrupt)
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            changed.wait_for(is_over.is_set, deadline)
        assert not deadline.has_passed
    finally:
        other.join()
