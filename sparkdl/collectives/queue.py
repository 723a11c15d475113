"""Work that is done one after the other, in the order in which it was given.

Runs in: child
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from sparkdl.core.errors import ConfigError

T = TypeVar("T")
_Item = tuple[Callable[[], Any], "Future[Any]", str | None]


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
        self._under_way: set[str] = set()
        self._items: SimpleQueue[_Item | None] | None = None

    def submit(self, work: Callable[[], T], name: str | None = None) -> Future[T]:
        """Have `work` done by the thread, after all that was given before.

        Args:
            name: of the work; nothing else of this name can be given until it is done.

        Raises:
            ConfigError: if something of this name is under way.
        """
        future: Future[T] = Future()
        with self._state:
            self._claim(name)
            if self._items is None:
                self._items = SimpleQueue()
                threading.Thread(
                    target=self._serve, args=(self._items,), name=self._name, daemon=True
                ).start()
            self._waiting += 1
            self._items.put((work, future, name))
        return future

    def run(self, work: Callable[[], T], name: str | None = None) -> T:
        """Do `work` after all that was given before; return what it returns. See `submit`."""
        with self._state:
            mine = not self._waiting and self._turn.acquire(blocking=False)
            if mine:
                self._claim(name)
        if not mine:
            return self.submit(work, name).result()
        try:
            return work()
        finally:
            with self._state:
                self._under_way.discard(name or "")
            self._turn.release()

    def close(self) -> None:
        """End the thread, after what it was given."""
        with self._state:
            items, self._items = self._items, None
        if items is not None:
            items.put(None)

    def _serve(self, items: SimpleQueue[_Item | None]) -> None:
        while (item := items.get()) is not None:
            work, future, name = item
            try:
                with self._turn:
                    result = work()
            except BaseException as error:  # noqa: BLE001 (it is the waiter's)
                self._done(name, future.set_exception, error)
            else:
                self._done(name, future.set_result, result)

    def _done(self, name: str | None, tell: Callable[[Any], None], what: Any) -> None:
        with self._state:
            self._waiting -= 1
            self._under_way.discard(name or "")
        tell(what)

    def _claim(self, name: str | None) -> None:
        if name in self._under_way:
            raise ConfigError(
                f"{name} is under way already: give each operation a name of its own, or "
                "synchronize the first one before the next"
            )
        if name:
            self._under_way.add(name)
