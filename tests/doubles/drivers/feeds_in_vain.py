"""Feeds more than the nodes hold, which read nothing: the feeder waits."""

from __future__ import annotations

from collections.abc import Iterator

from sparkdl.core.options import Feeding
from tests.doubles.drivers.driver import start
from tests.doubles.map_funs import hang

ROW = bytes(1 << 20)


def rows() -> Iterator[bytes]:
    """Say when the nodes are full."""
    for number in range(1000):
        if number == 8:  # two batches on their way, one for each node to hold, one to wait
            print("now", flush=True)
        yield ROW


with start(hang, feeding=Feeding(memory_nbytes=1 << 20)) as cluster:
    try:
        cluster.feed(rows())
    finally:
        cluster.abort()
        print(cluster.status(), flush=True)
