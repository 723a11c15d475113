"""The interface of executors: the places where nodes and feeders run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from sparkdl.control.tls import Tls
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, SparkdlError
from sparkdl.core.spec import ClusterSpec, NodeSpec
from sparkdl.feed.transfer.messages import FedPartition, FeedSpec
from sparkdl.storage.parquet.source import ParquetSource


@dataclass(frozen=True)
class Launch:
    """Everything that starting the nodes takes."""

    url: str
    token: str = field(repr=False)
    spec: ClusterSpec
    payload: bytes = field(repr=False)
    root_cause_of: Callable[[SparkdlError], SparkdlError] = lambda error: error
    """Returns the nodes' failure behind a failed inference, or the error itself."""
    is_lost: Callable[[NodeSpec, int], bool] = lambda node, pid: True
    """Whether the agent of a node, by its process id, was connected and is not any more."""
    tls: Tls | None = None
    """The certificates of the cluster's servers; `None` without TLS."""


class Executor(Protocol):
    """Starts nodes and runs feeders. Methods may be called from any thread.

    The methods with a body are right for an executor without Spark.
    """

    def driver_host(self) -> str:
        """Return the address of this machine under which the executors reach it."""

    def encrypting_setting(self) -> str:
        """Return the setting by which the place encrypts its own connections; empty if none."""
        return ""

    def gathering(self) -> AbstractContextManager[Any]:
        """Return a lock that a launch holds until its nodes have gathered."""
        return nullcontext()

    def start(self, launch: Launch, on_broken: Callable[[SparkdlError], object]) -> None:
        """Start all nodes and return; `on_broken` is called once no more nodes will come."""

    def relaunch(self, nodes: Sequence[NodeSpec]) -> None:
        """Start new agents for lost nodes, unless some are on their way; return soon."""

    def forget_task(self, node: NodeSpec) -> None:
        """Note that the task of this node has ended in order: it will not start the node again."""
        return

    def leave_host(self, host: str) -> None:
        """Prevent further tasks on a lost host; return soon."""
        return

    def feed(self, data: Any, spec: FeedSpec) -> list[FedPartition]:
        """Feed every partition of `data`; blocks until each is delivered or refused."""

    def stream(
        self,
        data: Any,
        feed: Callable[[Any], object],
        is_wanted: Callable[[], bool],
        nodes: Callable[[], int],
        **options: Any,
    ) -> Any:
        """Start a query that feeds the micro-batches of a streaming DataFrame, and return it.

        `feed` returns when the nodes have read a DataFrame; `options` are the query's.
        """
        raise ConfigError("train_stream needs Spark; with executor='local' call cluster.feed")

    def scanned_files(self, data: Any, is_local: bool) -> ParquetSource:
        """Return the files whose rows `data` holds; a `ConfigError` says why nodes cannot read."""

    def infer(self, data: Any, spec: FeedSpec, schema: Any) -> Any:
        """Return what `Cluster.infer` does: lazily, where the executor can."""

    def thread(self, run: Callable[[], None], name: str) -> threading.Thread:
        """Return a daemon thread that may call `feed`, with the settings of the calling one."""
        return threading.Thread(target=run, name=name, daemon=True)

    def cancel_feeds(self, feed: str | None = None) -> None:
        """End running `feed` calls soon: those of one feed, or all."""

    def close(self, deadline: Deadline) -> None:
        """End the remaining jobs or processes of the nodes; other threads may call it again."""
