"""Horovod's `runner.util.threads`: a function in a thread of its own.

Runs in: anywhere

https://github.com/horovod/horovod/blob/v0.28.1/horovod/runner/util/threads.py
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sparkdl.core.errors import ConfigError


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
    if not isinstance(args, tuple):
        raise ConfigError(f"args={args!r}: must be a tuple, (arg,) for a single argument")

    def work() -> None:
        with suppress(*[BaseException] * silent):
            target(*args)

    thread = threading.Thread(target=work, name=name, daemon=daemon)
    thread.start()
    return thread
