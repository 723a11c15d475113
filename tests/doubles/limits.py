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
    limit = free[-1] if but else 3  # 0 to 2 stay open, and others may be closed meanwhile
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
