"""Feeds without end what the nodes read."""

from __future__ import annotations

from collections.abc import Iterator

from sparkdl.core.options import Feeding
from tests.doubles.drivers.driver import start
from tests.doubles.map_funs import count_rows


def rows() -> Iterator[int]:
    """Say when the feed is under way."""
    yield from range(100_000)
    print("now", flush=True)
    while True:
        yield 1


with start(count_rows, feeding=Feeding(memory_nbytes=1 << 20)) as cluster:
    try:
        cluster.feed(rows())
    finally:
        cluster.abort()
        print(cluster.status(), flush=True)
