"""Waits for nodes that do not return."""

from __future__ import annotations

from tests.doubles.drivers.driver import start
from tests.doubles.map_funs import hang

with start(hang) as cluster:
    try:
        print("now", flush=True)
        cluster.results()
    finally:
        cluster.abort()
        print(cluster.status(), flush=True)
