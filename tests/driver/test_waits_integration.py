"""A training that the feed holds up is seen to wait for rows."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

import sparkdl
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
    """Yield the rows of a batch every now and then."""
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
