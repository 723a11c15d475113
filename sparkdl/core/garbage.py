"""Python's garbage collector, while there is no garbage."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_LOOK = threading.Lock()
"""Two that look at once could turn the collector on for each other."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Let the collector rest inside.

    Importing a large library makes hundreds of thousands of objects that stay. The collector would
    look through them again and again: a quarter of the time that TensorFlow's import takes.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def frames_of_threads() -> dict[int, FrameType]:
    """Return the current frame of each thread, by ident, as `sys._current_frames` does.

    The collector rests meanwhile. Early releases of Python 3.11 make frame objects while they hold
    a lock of the interpreter: a collection that began there would lock up the whole process.
    https://github.com/python/cpython/issues/106883
    """
    with _LOOK, uncollected():
        return sys._current_frames()
