"""A job in a thread of its own, for whose outcome somebody waits or not.

Runs in: driver
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Generic, TypeVar

from sparkdl.core.deadline import Deadline
from sparkdl.driver.changed import Changed

T = TypeVar("T")
Thread = Callable[[Callable[[], None], str], threading.Thread]


def begin(job: Callable[[], T], name: str, thread: Thread) -> Future[T]:
    """Start `job`, whose result the future has. For a wait that may be interrupted: `run_aside`.

    Args:
        thread: makes the thread of a target and a name, as `Executor.thread` does.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(job())
        except BaseException as error:  # noqa: BLE001 (raised by the future)
            outcome.set_exception(error)

    thread(run, name).start()
    return outcome


class Outcome(Generic[T]):
    """What a job will have returned or raised; who waits for it may be interrupted."""

    def __init__(self) -> None:
        self._changed = Changed()
        self._result: T | None = None
        self._error: BaseException | None = None
        self._is_there = False

    def of(self, job: Callable[[], T]) -> None:
        """Do the job, once."""
        try:
            self._result = job()
        except BaseException as error:  # noqa: BLE001 (raised where somebody waits)
            self._error = error
        with self._changed:
            self._is_there = True
            self._changed.notify_all()

    def wait(self) -> T:
        """Wait for the job's end; return what it returned, or raise what it raised."""
        self._changed.wait_for(lambda: self._is_there, Deadline.after(None))
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


def run_aside(job: Callable[[], T], name: str, thread: Thread) -> T:
    """Do `job` in a thread; return what it does. An interrupt ends the wait for it alone."""
    outcome: Outcome[T] = Outcome()
    thread(partial(outcome.of, job), name).start()
    return outcome.wait()
