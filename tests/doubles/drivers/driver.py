"""What the driver programs here have in common: a cluster that prints the pids of its processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import sparkdl
from tests.doubles.nodes import launch, processes


def start(map_fun: Callable[[Any, Any], Any], **options: Any) -> sparkdl.Cluster:
    """Launch two nodes and print their pids."""
    cluster = launch(map_fun, **options)
    pids = [process.pid for pair in processes().values() for process in (pair.agent, pair.child)]
    print(json.dumps(pids), flush=True)
    return cluster
