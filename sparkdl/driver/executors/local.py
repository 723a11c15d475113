"""Nodes as processes of this machine, feeders as threads of this process: no Spark, no JVM."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import msgspec
import pyarrow as pa

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, LaunchError, SparkdlError
from sparkdl.core.failure import status_in_words
from sparkdl.core.spec import ClusterSpec, NodeSpec
from sparkdl.driver.executors.executor import Executor, Launch
from sparkdl.feed.transfer.feeder import Feeder
from sparkdl.feed.transfer.infer_task import answers, decode_results
from sparkdl.feed.transfer.messages import FedPartition, FeederError, FeedSpec
from sparkdl.node.gpus import split_gpus
from sparkdl.node.resources import assigned_gpus
from sparkdl.node.spec import AgentSpec, StatusLine, start_agent, tail_of
from sparkdl.node.task import Problem
from sparkdl.storage.parquet.source import ParquetSource
from sparkdl.values.rows import encode_rows
from sparkdl.values.tables import TABLES, Batches, holds_tables, tables_in

_log = logging.getLogger(__name__)

NUM_FEEDERS = 2
_KILL_WAIT_S = 5.0
_PAUSE_S = 1.0
"""Before an agent is started once more, in case it ends at once."""


class LocalExecutor(Executor):
    """Runs each node's agent as a subprocess.

    Data to feed is an iterable of rows or a table, see `tables_in`; a list of tables has one
    partition per table.
    """

    def __init__(self) -> None:
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self._over: dict[subprocess.Popen[bytes], threading.Event] = {}
        """By agent: set when it has ended."""
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._relaunched: set[NodeSpec] = set()
        self._start: Callable[[NodeSpec], None] | None = None
        self._feeds: list[tuple[str, threading.Event, list[Feeder]]] = []
        self._root_cause_of: Callable[[SparkdlError], SparkdlError] = lambda error: error
        self._is_lost: Callable[[NodeSpec, int], bool] = lambda node, pid: True

    def driver_host(self) -> str:
        return "127.0.0.1"

    def start(self, launch: Launch, on_broken: Callable[[SparkdlError], object]) -> None:
        """Start one agent per node; of a cluster on Spark, those on the driver's machine."""
        spec, self._root_cause_of, self._is_lost = launch.spec, launch.root_cause_of, launch.is_lost
        nodes = spec.nodes[: spec.driver_nodes or None]
        gpus = dict(_with_gpus(spec, nodes))

        def start(node: NodeSpec) -> None:
            self._start_agent(launch, node, gpus[node], on_broken)

        self._start = start
        for node in nodes:
            start(node)

    def has(self, node: NodeSpec) -> bool:
        return node.node_id in self._agents

    def relaunch(self, nodes: Sequence[NodeSpec]) -> None:
        """Start new agents for these nodes where the old ones have ended, in a thread.

        If one has lost its connection and is about to end, or is stopped and has to be killed,
        `on_broken` is called when it has ended; one that is about to join is left alone.
        """

        def run() -> None:
            self._closed.wait(_PAUSE_S if self._relaunched.intersection(nodes) else 0.0)
            living: list[tuple[NodeSpec, subprocess.Popen[bytes]]] = []
            with self._lock:
                for node in nodes:
                    agent = self._agents.get(node.node_id)
                    # Living agents are waited for below, without the lock.
                    has_ended = agent is not None and agent.poll() is not None
                    if agent is not None and not has_ended:
                        living.append((node, agent))
                    if self._start and has_ended and not self._closed.is_set():
                        self._relaunched.add(node)
                        self._start(node)
            for node, agent in living:
                try:
                    agent.wait(_KILL_WAIT_S)
                except subprocess.TimeoutExpired:
                    # An agent that never connected is coming up: killing it costs a restart.
                    if self._is_lost(node, agent.pid):  # it is stopped, and cannot end by itself
                        agent.kill()

        thread = threading.Thread(target=run, name="sparkdl-relaunch", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _start_agent(
        self,
        launch: Launch,
        node: NodeSpec,
        gpus: tuple[str, ...] | None,
        on_broken: Callable[[SparkdlError], object],
    ) -> None:
        spec, node_id = launch.spec, node.node_id
        agent_spec = AgentSpec(
            *(launch.url, launch.token, node_id, spec, "process"),
            executor_pid=os.getpid(),
            gpus=gpus,
            tls=launch.tls,
        )
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 (the watcher closes it)
        try:
            agent = start_agent(agent_spec, launch.payload, sys.path, stderr.fileno())
        except BaseException:
            stderr.close()
            raise
        # The previous agent's pipe may still be open here, and nothing else closes it.
        if before := self._agents.get(node_id):
            _close_pipe(before)
        self._agents[node_id] = agent
        self._over[agent] = threading.Event()
        watcher = threading.Thread(
            target=self._watch,
            args=(agent, stderr, node.name, on_broken),
            name=f"sparkdl-local-{node.name}",
            daemon=True,
        )
        watcher.start()
        self._threads.append(watcher)

    def feed(self, data: Any, spec: FeedSpec) -> list[FedPartition]:
        partitions = _partitions(data)
        spec.check_partitions(len(partitions))
        feeders = [Feeder(spec, number) for number in range(len(partitions))]
        feed = (spec.feed, threading.Event(), feeders)
        with self._lock:
            self._feeds.append(feed)
        pool = ThreadPoolExecutor(NUM_FEEDERS, thread_name_prefix="sparkdl-feeder")
        try:
            tasks = [
                pool.submit(feeder.feed, _until(feed[1], _batches(partition)))
                for feeder, partition in zip(feeders, partitions, strict=True)
            ]
            return [task.result() for task in tasks]
        except BaseException:  # an interrupt, perhaps: feeders that wait for a node have to stop
            feed[1].set()
            for feeder in feeders:
                feeder.cancel()
            raise
        finally:
            # Without a wait: a feeder that hangs must not hold up the error of another one.
            pool.shutdown(wait=False, cancel_futures=True)
            with self._lock:
                self._feeds.remove(feed)

    def scanned_files(self, data: Any, is_local: bool) -> ParquetSource:
        raise ConfigError(
            "with executor='local' nodes can only read files of sparkdl.parquet, not a "
            f"{type(data).__name__}"
        )

    def infer(self, data: Any, spec: FeedSpec, schema: Any) -> Iterator[Any]:
        if schema is not None:
            raise ConfigError(
                f"schema={schema!r} makes a DataFrame, which needs Spark; leave it out"
            )
        return self._answers(data, spec)

    def _answers(self, data: Any, spec: FeedSpec) -> Iterator[Any]:
        try:
            for number, partition in enumerate(_partitions(data)):
                for results in answers(spec, _batches(partition), number):
                    yield from decode_results(results)
        except FeederError as error:
            raise self._root_cause_of(error) from None

    def cancel_feeds(self, feed: str | None = None) -> None:
        with self._lock:
            for name, cancelled, feeders in self._feeds:
                if feed in (None, name):
                    cancelled.set()
                    for feeder in feeders:
                        feeder.cancel()

    def close(self, deadline: Deadline) -> None:
        with self._lock:
            self._closed.set()
        for agent in self._agents.values():
            _close_pipe(agent)
        for agent in self._agents.values():
            # All pipes are closed first, so that the agents end at the same time.
            if not self._over[agent].wait(deadline.wait_s):
                _log.warning(
                    "Agent process %d did not end in time and was killed; its last lines may be "
                    "missing",
                    agent.pid,
                )
                agent.kill()
                agent.wait(_KILL_WAIT_S)
        for thread in self._threads:
            thread.join(_KILL_WAIT_S)

    def _watch(
        self,
        agent: subprocess.Popen[bytes],
        stderr: IO[bytes],
        name: str,
        on_broken: Callable[[SparkdlError], object],
    ) -> None:
        assert agent.stdout is not None
        problem, work_dir = None, ""
        with agent.stdout as stdout, stderr:
            for line in stdout:
                update = msgspec.json.decode(line, type=StatusLine)
                problem = Problem(update.kind, update.error) if update.error else problem
                work_dir = update.work_dir or work_dir
            status = agent.wait()
            self._over[agent].set()
            if work_dir:
                shutil.rmtree(work_dir, ignore_errors=True)
            if status:
                tail = tail_of(stderr) or "(no output)"
                text = f"the agent of {name} ended with {status_in_words(status)}: {tail}"
                on_broken(problem.at_driver() if problem else LaunchError(text))


def _close_pipe(agent: subprocess.Popen[bytes]) -> None:
    """Close the pipe whose end ends an agent."""
    if agent.stdin and not agent.stdin.closed:
        agent.stdin.close()


def _with_gpus(
    spec: ClusterSpec, nodes: Sequence[NodeSpec]
) -> Iterator[tuple[NodeSpec, tuple[str, ...] | None]]:
    assigned = assigned_gpus()
    takers = [node for node in nodes if spec.gpus_of(node) != 0]
    shares = dict(zip(takers, split_gpus(assigned or (), len(takers)), strict=True))
    for node in nodes:
        yield node, None if assigned is None else shares.get(node, ())


def _until(
    cancelled: threading.Event, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yield the batches; raise if cancelled, since a return would mean the partition's end."""
    for batch in batches:
        if cancelled.is_set():
            raise FeederError("it was cancelled")
        yield batch


def _partitions(data: Any) -> Sequence[Any]:
    if holds_tables(data):
        return tables_in(data)
    is_text_or_frame = isinstance(data, (str, bytes, Mapping)) or hasattr(data, "columns")
    if is_text_or_frame or not isinstance(data, Iterable):
        raise ConfigError(
            f"executor='local' feeds tables and iterables of rows, not {type(data).__name__}; give "
            f"{TABLES}"
        )
    return [data]


def _batches(partition: Any) -> Iterator[pa.RecordBatch]:
    return iter(partition) if isinstance(partition, Batches) else encode_rows(partition)
