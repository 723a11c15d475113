"""Nodes as tasks of an ordinary Spark job, feeders as tasks of further jobs.

Runs in: driver
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from pyspark import RDD, InheritableThread
from pyspark.resource import ResourceProfile
from pyspark.sql import DataFrame, SparkSession

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError
from sparkdl.driver.executors.executor import Launch
from sparkdl.feed.feeder import FedPartition, FeedOrder
from sparkdl.feed.task import (
    FED_SCHEMA,
    RESULT_SCHEMA,
    FeedDataFrame,
    FeedRdd,
    InferDataFrame,
    InferRdd,
    decode_results,
    fed_partition,
)
from sparkdl.node.task import NODE_SCHEMA, NodeTask

_log = logging.getLogger(__name__)
_JOIN_S = 5.0


class SparkExecutor:
    """Starts nodes through `spark` and feeds through whoever calls `feed`.

    Args:
        is_attached: whether the nodes' tasks stay as long as the nodes.
        profile: resources of a node's task; `None` for the session's defaults.
    """

    def __init__(
        self, spark: SparkSession, cluster_id: str, is_attached: bool, profile: ResourceProfile | None
    ) -> None:
        self._spark = spark
        self._is_attached = is_attached
        self._profile = profile
        self._nodes_tag = f"sparkdl-nodes-{cluster_id}"
        self._feed_tag = f"sparkdl-feed-{cluster_id}"
        self._thread: threading.Thread | None = None

    def driver_host(self) -> str:
        """Return what Spark's own executors call this machine."""
        return str(self._spark.conf.get("spark.driver.host"))

    def start(self, launch: Launch, on_broken: Callable[[str], None]) -> None:
        """Submit the job whose tasks are the nodes."""
        task = NodeTask(launch.url, launch.token, launch.spec, launch.payload, self._is_attached)
        num_nodes = len(launch.spec.nodes)

        def run() -> None:
            self._spark.addTag(self._nodes_tag)
            try:
                nodes = self._spark.range(num_nodes, numPartitions=num_nodes)
                nodes.mapInArrow(task, NODE_SCHEMA, profile=self._profile).collect()
            except Exception as error:  # noqa: BLE001 (whatever it is, the cluster has to know)
                _log.debug("The job of the nodes failed", exc_info=True)
                on_broken(f"the Spark job that carries the nodes failed: {_last_line(error)}")
            finally:
                self._spark.removeTag(self._nodes_tag)

        name = f"sparkdl-nodes-{launch.spec.cluster_id}"
        self._thread = InheritableThread(target=run, name=name, daemon=True, session=self._spark)
        self._thread.start()

    def feed(self, data: Any, order: FeedOrder) -> list[FedPartition]:
        """Run one Spark job in the calling thread, with its local properties."""
        self._spark.addTag(self._feed_tag)
        try:
            if isinstance(data, RDD):
                return data.mapPartitions(FeedRdd(order)).collect()
            if _is_dataframe(data):
                rows = data.mapInArrow(FeedDataFrame(order), FED_SCHEMA).collect()
                return [fed_partition(row.partition, row.rows, row.refused) for row in rows]
        finally:
            self._spark.removeTag(self._feed_tag)
        raise ConfigError(
            f"a {type(data).__module__}.{type(data).__name__} cannot be fed; give a DataFrame or an RDD"
        )

    def infer(self, data: Any, order: FeedOrder, schema: str | None) -> Any:
        """Return an RDD of results, or a DataFrame of `schema`; both lazy."""
        if isinstance(data, RDD):
            results = data.mapPartitions(InferRdd(order))
        elif _is_dataframe(data):
            encoded = data.mapInArrow(InferDataFrame(order), RESULT_SCHEMA)
            results = encoded.rdd.flatMap(_decode_row)
        else:
            raise ConfigError(f"inference takes a DataFrame or an RDD, not {type(data).__name__}")
        return results if schema is None else self._spark.createDataFrame(results, schema)

    def cancel_feeds(self) -> None:
        """Cancel the jobs of running `feed` calls."""
        self._spark.interruptTag(self._feed_tag)

    def close(self, deadline: Deadline) -> None:
        """Wait for the nodes' job, which ends with its agents; cancel it if it stays."""
        if self._thread is None:
            return
        self._thread.join(deadline.wait_s)
        if self._thread.is_alive():
            _log.warning("The job of the nodes did not end in time; cancelling it")
            self._spark.interruptTag(self._nodes_tag)
            self._thread.join(_JOIN_S)


def _is_dataframe(data: Any) -> bool:
    """Whether `data` is a DataFrame, of a classic session or of Spark Connect."""
    return isinstance(data, DataFrame) or hasattr(data, "mapInArrow")


def _decode_row(row: Any) -> list[Any]:
    return decode_results(row.ipc)


def _last_line(error: Exception) -> str:
    """Return what a Python worker raised, or the error's first line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "sparkdl." in line and "Error" in line and "File " not in line]
    return (told or lines or [type(error).__name__])[0].strip()
