"""Who waits for whom in real trainings: for a slow feed, for a straggler."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparkdl
from sparkdl.core.options import Feeding
from sparkdl.driver.events import Sampled
from sparkdl.driver.history import Clusters, History
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import SOON_S, launch
from tests.doubles.until import until

_LOOK_S = 0.2
looked = partial(until, within_s=SOON_S, look_s=_LOOK_S)


def rest(seconds: float) -> None:
    threading.Event().wait(seconds)


def launched(cluster: sparkdl.Cluster) -> History:
    clusters = Clusters()
    for event in cluster._controller.events.present():
        clusters.add(event)
    return clusters.histories[cluster.spec.cluster_id]


def look(cluster: sparkdl.Cluster, history: History) -> list[float]:
    """Take a sample; return the shares of the last minute that nodes have waited for rows."""
    for event in cluster._controller.events.present():
        if isinstance(event, Sampled):
            history.add(event)
    return [row.waits.get("rows", 0.0) for row in history.rows()]


_FEATURES = 1 << 16
"""So that sixteen rows are a record batch, and travel as soon as they are there."""


def slow_rows(pause_s: float, is_over: threading.Event) -> Iterator[dict[str, Any]]:
    features = np.random.default_rng(0).random(_FEATURES, np.float32)
    while not is_over.is_set():
        yield from [{"x": features, "y": np.float32(0)}] * 16
        rest(pause_s)


def read_in_a_thread(_: Any, ctx: NodeContext) -> None:
    """Let a thread fetch the batches that the main thread waits for."""
    fetched: queue.Queue[Any] = queue.Queue(2)

    def fetch() -> None:
        for batch in ctx.batches(8):
            fetched.put(batch)
        fetched.put(None)

    threading.Thread(target=fetch, daemon=True).start()
    while fetched.get() is not None:
        pass


def test_training_that_the_feed_holds_up_is_seen_to_wait_for_rows() -> None:
    is_over = threading.Event()
    with launch(read_in_a_thread, nodes=1) as cluster:
        history = launched(cluster)
        feeding = cluster.feed_async(slow_rows(0.4, is_over))
        try:
            assert looked(lambda: min(look(cluster, history)) > 0.5)
        finally:
            is_over.set()
        feeding.result(SOON_S)


def train_in_step(end: Path, ctx: NodeContext) -> None:
    """Reduce with each other until a file is there; rank 1 sleeps in each step."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    is_over = torch.zeros(1)
    while not is_over.item():
        if ctx.rank == 1:
            time.sleep(0.1)  # noqa: TID251 (what a straggler does)
        is_over.fill_(end.exists())
        dist.all_reduce(is_over)
    ctx.barrier()


@pytest.mark.smoke
@pytest.mark.timeout(300)
@pytest.mark.torch
def test_nodes_are_seen_to_wait_for_the_one_that_is_late_in_each_step(tmp_path: Path) -> None:
    end, alone = tmp_path / "end", Feeding(fed=False)
    with launch(train_in_step, end, 2, framework="torch", feeding=alone) as cluster:
        history = launched(cluster)

        def lag() -> float:
            look(cluster, history)
            fast, slow = (row.waits.get("others", 0.0) for row in history.rows())
            return fast - slow

        assert looked(lambda: lag() > 0.3 or "Running" not in cluster.status(), within_s=120.0)
        end.touch()
        cluster.results(60)
    assert lag() > 0.3
