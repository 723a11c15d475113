"""A condition that Ctrl-C cannot leave locked.

Runs in: driver

An interrupt is raised wherever Python has just called something, or begins a function: also within
`threading.Condition.__enter__`, `__exit__` and `wait`, when the lock has been taken and nobody
will give it back. Every other thread then waits for ever, the cluster's own first of all. A lock
of C in a `with` statement is given back in any case.
"""

from __future__ import annotations

import threading
from _thread import RLock
from collections.abc import Callable

from sparkdl.core.deadline import Deadline


class Changed(RLock):  # type: ignore[misc]  # a class of C that may be derived from
    """Guards a state in a `with` statement; `wait_for` waits until something is true of it.

    `wait_for` and the functions that it is given are called by any thread, interrupted or not.
    """

    def __init__(self) -> None:
        self._waiters: list[threading.Lock] = []
        self.count = 0
        """Of the calls of `notify_all`, for who waits for the next one."""

    def notify_all(self) -> None:
        """Have all who wait look again; the lock is held."""
        self.count += 1
        for waiter in self._waiters:
            if waiter.locked():
                waiter.release()

    def wait_for(self, is_true: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait until `is_true`, which is called with the lock held; return whether it is.

        The lock must not be held by who calls.
        """
        while True:
            with self:
                if is_true():
                    return True
                if deadline.has_passed:
                    return False
                waiter = threading.Lock()
                waiter.acquire()
                self._waiters.append(waiter)
            try:
                wait_s = deadline.wait_s
                waiter.acquire(timeout=-1 if wait_s is None else wait_s)
            finally:
                with self:
                    self._waiters.remove(waiter)
