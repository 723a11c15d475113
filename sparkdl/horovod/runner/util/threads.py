"""Horovod's `runner.util.threads`: functions in threads of their own.

Runs in: anywhere

https://github.com/horovod/horovod/blob/v0.28.1/horovod/runner/util/threads.py
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from sparkdl.core.errors import ConfigError


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: Sequence[Sequence[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, Any] | None:
    """Call `fn(*args)` for each of `args_list`, in threads.

    Args:
        block_until_all_done: whether to wait for the results.
        max_concurrent_executions: of so many threads at most.

    Returns:
        The results by their place in `args_list`, or `None` without waiting.

    Raises:
        RuntimeError: if a call has failed.
    """
    calls: queue.SimpleQueue[tuple[int, Sequence[Any]]] = queue.SimpleQueue()
    for call in enumerate(args_list):
        calls.put(call)
    results: dict[int, Any] = {}

    def work() -> None:
        with suppress(queue.Empty):
            while True:
                place, args = calls.get_nowait()
                results[place] = fn(*args)

    count = min(max_concurrent_executions, len(args_list))
    threads = [in_thread(work, daemon=not block_until_all_done) for _ in range(count)]
    if not block_until_all_done:
        return None
    for thread in threads:
        thread.join()
    if len(results) != len(args_list):
        failed = sorted({*range(len(args_list))} - {*results})
        raise RuntimeError(f"{fn!r} failed for the arguments at {failed} of args_list")
    return results


def in_thread(
    target: Callable[..., Any],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start a thread that calls `target(*args)`; return it.

    Args:
        silent: whether errors of `target` are dropped.

    Raises:
        ConfigError: if `args` is no tuple.
    """
    _check_tuple(args)

    def work() -> None:
        with suppress(*[BaseException] * silent):
            target(*args)

    thread = threading.Thread(target=work, name=name, daemon=daemon)
    thread.start()
    return thread


def on_event(
    event: threading.Event | None,
    func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start a thread that calls `func(*args)` once `event` is set; return it.

    Args:
        stop: ends the thread without a call if it is set first.
        check_stop_interval_s: seconds between two looks at `stop`.
        daemon: a thread that is not one needs `stop`.
        silent: whether errors of `func` are dropped.

    Raises:
        ConfigError: without an event, or without the `stop` that is needed.
    """
    if event is None:
        raise ConfigError("event=None: must be a threading.Event")
    _check_tuple(args)
    if stop is None and not daemon:
        raise ConfigError("daemon=False needs stop, an event that ends the thread")

    def work() -> None:
        if stop is None:
            event.wait()
        else:
            while not event.is_set() and not stop.is_set():
                # In turns, because a thread cannot wait for two events at once.
                event.wait(check_stop_interval_s)
        if stop is None or not stop.is_set():
            func(*args)

    return in_thread(work, daemon=daemon, silent=silent)


def _check_tuple(args: Any) -> None:
    if not isinstance(args, tuple):
        raise ConfigError(f"args={args!r}: must be a tuple, (arg,) for a single argument")
