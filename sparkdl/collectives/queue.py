"""Work that is done one after the other, in the order in which it was given.

Runs in: child
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_Item = tuple[Callable[[], Any], "Future[Any]"]


class InOrder:
    """A thread for what goes on beside the caller; what is waited for is done by who waits.

    Args:
        name: of the thread, which starts with the first `submit`. It does not keep the process
            alive: who fails with operations under way can end.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._turn = threading.Lock()
        self._state = threading.Lock()
        self._waiting = 0
        self._items: SimpleQueue[_Item | None] | None = None

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have `work` done by the thread, after all that was given before."""
        future: Future[T] = Future()
        with self._state:
            if self._items is None:
                self._items = SimpleQueue()
                threading.Thread(
                    target=self._serve, args=(self._items,), name=self._name, daemon=True
                ).start()
            self._waiting += 1
            self._items.put((work, future))
        return future

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
        """End the thread, after what it was given."""
        with self._state:
            items, self._items = self._items, None
        if items is not None:
            items.put(None)

    def _serve(self, items: SimpleQueue[_Item | None]) -> None:
        while (item := items.get()) is not None:
            work, future = item
            try:
                with self._turn:
                    result = work()
            except BaseException as error:  # noqa: BLE001 (it is the waiter's)
                self._done(future.set_exception, error)
            else:
                self._done(future.set_result, result)

    def _done(self, tell: Callable[[Any], None], what: Any) -> None:
        with self._state:
            self._waiting -= 1
        tell(what)
