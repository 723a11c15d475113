"""Nodes as plain processes of this machine, feeders as threads of this process: no Spark, no JVM.

Runs in: driver
"""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

import msgspec
import pyarrow as pa

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, LaunchError, SparkdlError
from sparkdl.driver.executors.executor import Launch
from sparkdl.feed.batch import RowEncoder
from sparkdl.feed.feeder import FedPartition, Feeder, FeedOrder, exchange
from sparkdl.feed.task import decode_results
from sparkdl.node.order import AgentNews, AgentOrder, start_agent

_log = logging.getLogger(__name__)

NUM_FEEDERS = 2
_KILL_WAIT_S = 5.0


class LocalExecutor:
    """Runs each node's agent as a subprocess.

    Data to feed is an iterable of rows or a `pyarrow.Table`; a list of tables has one partition
    per table.
    """

    def __init__(self) -> None:
        self._agents: list[subprocess.Popen[bytes]] = []
        self._watchers: list[threading.Thread] = []
        self._cancelled = threading.Event()

    def driver_host(self) -> str:
        """Return the loopback address."""
        return "127.0.0.1"

    def start(self, launch: Launch, on_broken: Callable[[SparkdlError], None]) -> None:
        """Start one agent per node; a thread each waits for its end."""
        for node in launch.spec.nodes:
            order = AgentOrder(launch.url, launch.token, node.node_id, launch.spec, owner="process")
            with tempfile.TemporaryFile() as stderr:
                agent = start_agent(order, launch.payload, sys.path, stderr.fileno())
            self._agents.append(agent)
            watcher = threading.Thread(
                target=self._watch,
                args=(agent, node.name, on_broken),
                name=f"sparkdl-local-{node.name}",
                daemon=True,
            )
            watcher.start()
            self._watchers.append(watcher)

    def feed(self, data: Any, order: FeedOrder) -> list[FedPartition]:
        """Feed every partition, a few at a time."""
        self._cancelled.clear()
        partitions = _partitions(data)
        with ThreadPoolExecutor(NUM_FEEDERS, thread_name_prefix="sparkdl-feeder") as pool:
            return list(
                pool.map(
                    lambda numbered: Feeder(order, numbered[0]).feed(
                        self._until_cancelled(_batches(numbered[1]))
                    ),
                    enumerate(partitions),
                )
            )

    def infer(self, data: Any, order: FeedOrder, schema: str | None) -> Iterator[Any]:
        """Yield one result per row, in order."""
        if schema is not None:
            raise ConfigError("schema= makes a DataFrame, which needs Spark; leave it out")
        for number, partition in enumerate(_partitions(data)):
            target = order.targets[number % len(order.targets)]
            for index, (_, group) in enumerate(groupby(_batches(partition), lambda b: b.schema)):
                for data_ in exchange(order, f"{number}.{index}.{id(partition)}", target, group):
                    yield from decode_results(data_)

    def cancel_feeds(self) -> None:
        """Stop reading partitions."""
        self._cancelled.set()

    def close(self, deadline: Deadline) -> None:
        """Let go of the agents, which ends them, and kill those that stay."""
        for agent in self._agents:
            if agent.stdin and not agent.stdin.closed:
                agent.stdin.close()
        for agent in self._agents:
            try:
                agent.wait(deadline.wait_s)
            except subprocess.TimeoutExpired:
                _log.warning("Agent process %d did not end in time; killing it", agent.pid)
                agent.kill()
                agent.wait(_KILL_WAIT_S)
        for watcher in self._watchers:
            watcher.join(_KILL_WAIT_S)

    def _until_cancelled(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if self._cancelled.is_set():
                return
            yield batch

    def _watch(
        self, agent: subprocess.Popen[bytes], name: str, on_broken: Callable[[SparkdlError], None]
    ) -> None:
        assert agent.stdout is not None
        error = ""
        with agent.stdout as stdout:
            for line in stdout:
                error = msgspec.json.decode(line, type=AgentNews).error or error
        status = agent.wait()
        if status:
            on_broken(LaunchError(error or f"the agent of {name} ended with status {status}"))


def _partitions(data: Any) -> Sequence[Any]:
    if isinstance(data, pa.Table):
        return [data]
    if not isinstance(data, Iterable):
        raise ConfigError(
            f"executor='local' feeds tables and iterables of rows, not {type(data).__name__}"
        )
    rows = data if isinstance(data, Sequence) else list(data)
    return rows if rows and all(isinstance(part, pa.Table) for part in rows) else [rows]


def _batches(partition: Any) -> Iterator[pa.RecordBatch]:
    if isinstance(partition, pa.Table):
        return iter(partition.to_batches())
    return RowEncoder().batches(partition)
