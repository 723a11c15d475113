"""A process that may have no more descriptors."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_descriptors_left(but: int = 0) -> Iterator[None]:
    """This process may open no file, but for a few."""
    free = [os.dup(0) for _ in range(but + 1)]  # the lowest; they need not follow each other
    for fd in free:
        os.close(fd)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
