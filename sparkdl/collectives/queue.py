"""Work that is done one after the other, in the order in which it was given.

Runs in: child
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class InOrder:
    """A thread for what goes on beside the caller; what is waited for is done by who waits.

    Args:
        name: of the thread, which starts with the first `submit`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._turn = threading.Lock()
        self._state = threading.Lock()
        self._waiting = 0
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have `work` done by the thread, after all that was given before."""
        with self._state:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, self._name)
            self._waiting += 1
            return self._pool.submit(self._one, work)

    def run(self, work: Callable[[], T]) -> T:
        """Do `work` after all that was given before; return what it returns."""
        with self._state:
            mine = not self._waiting and self._turn.acquire(blocking=False)
        if not mine:
            return self.submit(work).result()
        try:
            return work()
        finally:
            self._turn.release()

    def close(self) -> None:
        """End the thread; what it has not begun is cancelled."""
        with self._state:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _one(self, work: Callable[[], T]) -> T:
        try:
            with self._turn:
                return work()
        finally:
            with self._state:
                self._waiting -= 1
