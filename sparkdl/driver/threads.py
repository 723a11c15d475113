"""Waits that Ctrl-C may interrupt: a condition, and a job in a thread of its own.

Why not `threading.Condition`? An interrupt is raised wherever Python has just called something, or
begins a function: also within `Condition.__enter__`, `__exit__` and `wait`, which are Python code,
when the lock has been taken, and will never be released. Every other thread then waits for ever,
the cluster's own first of all. A lock of C in a `with` statement is released in any case.
"""

from __future__ import annotations

import threading
from _thread import RLock
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from sparkdl.core.deadline import Deadline

# Python handles a signal between two steps of the main thread. One that comes when the last step
# before a wait is done, and the wait has not begun, is handled when the wait is over: none is long.
_LONGEST_WAIT_S = 1.0

T = TypeVar("T")
Thread = Callable[[Callable[[], None], str], threading.Thread]


class Changed(RLock):  # type: ignore[misc]  # a class of C that may be derived from
    """Guards a state in a `with` statement; `wait_for` waits until something is true of it.

    `wait_for` and the functions that it is given are called by any thread, interrupted or not.
    """

    def __init__(self) -> None:
        self._waiters: list[threading.Lock] = []

    def notify_all(self) -> None:
        """Wake all waiting threads to look again; the caller holds the lock."""
        for waiter in self._waiters:
            # An earlier call has woken this one already, and a second release would raise.
            if waiter.locked():
                waiter.release()

    def wait_for(self, is_true: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait until `is_true`, which is called with the lock held; return whether it is.

        The caller must not hold the lock.
        """
        while True:
            with self:
                if is_true():
                    return True
                if deadline.has_passed:
                    return False
                waiter = threading.Lock()  # one for each wait, as in `threading.Condition`
                waiter.acquire()
                self._waiters.append(waiter)
            try:
                waiter.acquire(timeout=min(deadline.remaining_s, _LONGEST_WAIT_S))
            finally:
                with self:
                    self._waiters.remove(waiter)


class Outcome(Future[T]):
    """The future of a job that runs. The thread that waits for its result may be interrupted.

    Why not a `Future`? Its `result` waits by a `threading.Condition`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()  # from here on `cancel` is refused
        self._changed = Changed()
        self._is_there = False

    def of(self, job: Callable[[], T]) -> None:
        try:
            self.set_result(job())
        except BaseException as error:  # noqa: BLE001 (raised in `result`)
            self.set_exception(error)
        with self._changed:
            self._is_there = True
            self._changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._changed.wait_for(lambda: self._is_there, Deadline.after(timeout_s))

    def result(self, timeout: float | None = None) -> T:
        # 0.0 makes `Future.result` raise its TimeoutError at once.
        return super().result(None if self.wait(timeout) else 0.0)


def _daemon(run: Callable[[], None], name: str) -> threading.Thread:
    return threading.Thread(target=run, name=name, daemon=True)


def begin(job: Callable[[], T], name: str, thread: Thread = _daemon) -> Outcome[T]:
    """Start `job` in a thread. An interrupt ends the wait for its result, not the job.

    Args:
        thread: makes the thread of a target and a name; `Executor.thread` does for jobs of Spark.
    """
    outcome: Outcome[T] = Outcome()
    thread(partial(outcome.of, job), name).start()
    return outcome
