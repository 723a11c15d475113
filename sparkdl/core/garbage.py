"""Python's garbage collector, while there is no garbage.

Runs in: anywhere
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
