"""A job in a thread of its own, whose outcome is a future.

Runs in: driver
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
Thread = Callable[[Callable[[], None], str], threading.Thread]


def begin(job: Callable[[], T], name: str, thread: Thread) -> Future[T]:
    """Start `job`; whoever asks for the result waits for it, and an interrupt ends that wait alone.

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
