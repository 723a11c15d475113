"""`SerialExecutor`: work in the order given, beside the caller and by the caller."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from sparkdl.core.errors import ConfigError

T = TypeVar("T")
_Item = tuple[Callable[[], Any], "Future[Any]", str | None]


class SerialExecutor:
    """Runs work in the order in which it was given: `submit` in a thread, `run` in the caller's.

    Work that calls `run` itself goes on at once.

    Args:
        thread_name: of the thread, which starts with the first `submit`. It is a daemon, so that a
            process that fails with operations under way can end.
    """

    def __init__(self, thread_name: str) -> None:
        self._thread_name = thread_name
        self._turn = threading.Lock()
        self._state = threading.Lock()
        self._owner = 0
        self._waiting = 0
        self._under_way: set[str] = set()
        self._items: SimpleQueue[_Item | None] | None = None

    def submit(self, work: Callable[[], T], name: str | None = None) -> Future[T]:
        """Call `work` in the thread, after all that was given before.

        In a group this is for what goes on beside the training: all members submit the same work in
        the same order.

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
                    target=self._serve, args=(self._items,), name=self._thread_name, daemon=True
                ).start()
            self._waiting += 1
            self._items.put((work, future, name))
        return future

    def run(self, work: Callable[[], T], name: str | None = None) -> T:
        """Call `work` here, after all that was given before, and return its result.

        While the thread is idle this costs two locks, and no switch to another thread.

        Raises:
            ConfigError: see `submit`.
        """
        if self._owner == threading.get_ident():
            return work()
        with self._state:
            # Work that waits was given before, and must not be overtaken.
            mine = not self._waiting and self._turn.acquire(blocking=False)
            if mine:
                self._claim(name)
        if not mine:
            return self.submit(work, name).result()
        self._owner = threading.get_ident()
        try:
            return work()
        finally:
            self._owner = 0
            with self._state:
                self._under_way.discard(name or "")
            self._turn.release()

    def close(self) -> None:
        """End the thread after the submitted calls. `submit` would start another one."""
        with self._state:
            items, self._items = self._items, None
        if items is not None:
            items.put(None)

    def _serve(self, items: SimpleQueue[_Item | None]) -> None:
        while (item := items.get()) is not None:
            work, future, name = item
            try:
                with self._turn:
                    self._owner = threading.get_ident()
                    try:
                        result = work()
                    finally:
                        self._owner = 0
            except BaseException as error:  # noqa: BLE001 (it is the waiter's)
                self._done(name, future.set_exception, error)
            else:
                self._done(name, future.set_result, result)

    def _done(self, name: str | None, report: Callable[[Any], None], outcome: Any) -> None:
        with self._state:
            self._waiting -= 1
            self._under_way.discard(name or "")
        # Last: whoever waits may give work of the same name at once, and callbacks run in here.
        report(outcome)

    def _claim(self, name: str | None) -> None:
        if name in self._under_way:
            raise ConfigError(
                f"{name} is under way already: give each operation a name of its own, or "
                "synchronize the first one before the next"
            )
        if name:
            self._under_way.add(name)
