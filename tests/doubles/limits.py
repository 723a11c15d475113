"""A process that may have no more descriptors, or write no more to its disk."""

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
    with _limited(resource.RLIMIT_NOFILE, free[-1]):
        yield


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may grow, as on a full disk."""
    with _limited(resource.RLIMIT_FSIZE, 0):
        yield


@contextmanager
def _limited(kind: int, limit: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)
