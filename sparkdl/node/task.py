"""The Spark task of a node: checks its executor, starts an agent, stays with it or lets it go.

Runs in: feeder, driver
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from sparkdl.control.messages import StartFailed
from sparkdl.control.tls import Tls
from sparkdl.core.errors import (
    ConfigError,
    FrameworkMissingError,
    LaunchError,
    SparkConfigError,
    SparkdlError,
)
from sparkdl.core.failure import Code, status_in_words
from sparkdl.core.spec import ClusterSpec
from sparkdl.frameworks.framework import framework_named
from sparkdl.node.resources import assigned_gpus, executor_jvm_pid
from sparkdl.node.spec import AgentSpec, StatusLine, start_agent, tail_of

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger(__name__)

NODE_SCHEMA = "node_id long"
"""Spark schema of what a node's task returns."""

_CONNECT_TIMEOUT_S = 10.0
"""A firewall that drops packets gives no answer at all; any other host answers sooner."""
_KINDS: dict[str, type[SparkdlError]] = {
    kind.__name__: kind for kind in (ConfigError, SparkConfigError, FrameworkMissingError)
}


@dataclass(frozen=True)
class Problem:
    """A problem of a node's start: the name of the error to raise at the driver, and its text."""

    kind: str
    text: str

    def error(self) -> LaunchError:
        return LaunchError(Code.RAISED.mark(self.kind, self.text))

    def at_driver(self) -> SparkdlError:
        return _KINDS.get(self.kind, LaunchError)(self.text)


def parse_problem(text: str) -> Problem | None:
    found = Code.RAISED.values_in(text)
    return Problem(*found) if found else None


def check_executor(spec: ClusterSpec, url: str) -> None:
    """Check that the requested framework is installed and the coordinator can be reached."""
    host = socket.gethostname()
    if problem := missing_framework(spec.framework):
        raise problem.error()
    target, _, port = url.rpartition("//")[2].rpartition(":")
    try:
        # Checked before an agent starts, so that the error names the host and the address.
        socket.create_connection((target.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise Problem("ConfigError", cannot_reach_driver(host, url, str(error))).error() from None


def missing_framework(name: str) -> Problem | None:
    wanted = framework_named(name).distributions
    if not wanted or any(importlib.util.find_spec(module) for module in wanted):
        return None
    return Problem(
        "FrameworkMissingError",
        f"framework={name!r} is not installed on executor {socket.gethostname()}: "
        f"{sys.executable} finds no module {' or '.join(wanted)}. Install it there, or "
        "choose another framework ('plain' for none)",
    )


def cannot_reach_driver(host: str, url: str, problem: str) -> str:
    return (
        f"executor {host} cannot reach the driver at {url}: {problem}. Set "
        "SPARKDL_DRIVER_HOST to an address of the driver that executors can reach, and "
        "SPARKDL_DRIVER_PORT to a port or range that the firewall lets through, or run the driver "
        "in the cluster"
    )


@dataclass(frozen=True)
class NodeTask:
    """For `DataFrame.mapInArrow` over one partition for each node that Spark runs, in their order.

    Attributes:
        payload: the pickled `(map_fun, args)`.
        node_ids: by partition.
        tls: what the cluster's servers show; `None` without TLS.
    """

    url: str
    token: str = field(repr=False)
    spec: ClusterSpec
    payload: bytes = field(repr=False)
    node_ids: tuple[int, ...]
    tls: Tls | None = None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        from pyspark import TaskContext

        for _ in batches:  # all are to be read, or Spark gives this worker and its imports up
            pass
        context = TaskContext.get()
        assert context is not None
        node_id = self.node_ids[context.partitionId()]
        attempt, has_been_there = context.attemptNumber(), False
        try:
            check_executor(self.spec, self.url)
            has_been_there = True
            self._run(node_id, f"{context.stageId()}.{context.partitionId()}")
        except LaunchError as error:
            problem = parse_problem(str(error))
            # Reported rather than raised: Spark would try four times and print all tracebacks.
            # If the driver was there before and is gone now, the cluster has ended: not an error.
            # Only a first attempt may end in order. A later one raises, so that Spark repeats it,
            # perhaps on another executor.
            if problem is None or attempt or not (self._report(problem) or has_been_there):
                raise
        yield pa.RecordBatch.from_pydict({"node_id": [node_id]})

    def _report(self, problem: Problem) -> bool:
        """Report to the driver why the node cannot start; return whether it knows now."""
        from sparkdl.control.client import CoordinatorClient

        failed = StartFailed(problem.kind, problem.text)
        lease_s, trust = self.spec.settings.lease_s, self.tls.trust if self.tls else None
        try:
            asyncio.run(CoordinatorClient.say(self.url, self.token, lease_s, failed, trust))
        except LaunchError:
            return False
        return True

    def _run(self, node_id: int, task: str) -> None:
        from pyspark import SparkFiles

        executor_pid = executor_jvm_pid()
        if executor_pid is None and self.spec.placement == "detached":
            raise LaunchError(
                "a detached node watches its executor's JVM, and none is among this process's "
                "parents and connections; use placement='attached'"
            )
        agent_spec = AgentSpec(
            url=self.url,
            token=self.token,
            node_id=node_id,
            spec=self.spec,
            owner="task",
            task=task,
            executor_pid=executor_pid,
            gpus=assigned_gpus(),
            tls=self.tls,
            spark_files=SparkFiles.getRootDirectory(),
        )
        # Spark may not repeat a task often, and would end the other nodes' tasks with this one.
        for tries_left in reversed(range(self.spec.settings.max_restarts + 1)):
            ending = self._run_agent(agent_spec)
            if not ending:
                return
            if not tries_left:
                raise LaunchError(ending)
            _log.warning("%s. Starting another one", ending)

    def _run_agent(self, agent_spec: AgentSpec) -> str:
        """Start an agent and stay with it; return how it ended, empty if in order.

        One that was detached continues without its task.
        """
        # A file, because a pipe without a reader would block the agent once it is full.
        with tempfile.TemporaryFile() as stderr, ExitStack() as stack:
            process = start_agent(agent_spec, self.payload, sys.path, stderr.fileno())
            assert process.stdout is not None
            if agent_spec.executor_pid is not None:  # else only this task's end would end the agent
                stack.enter_context(_daemon_may_end())  # now: the agent would inherit it
            problem, work_dir = None, ""
            for printed in process.stdout:
                line = msgspec.json.decode(printed, type=StatusLine)
                problem = Problem(line.kind, line.error) if line.error else problem
                work_dir = line.work_dir or work_dir
                if line.is_detached:
                    _leave(process)
                    return ""
            status = process.wait()
            # A killed agent leaves its files behind.
            if work_dir:
                shutil.rmtree(work_dir, ignore_errors=True)
            if problem and status:
                raise problem.error()
            name = self.spec.nodes[agent_spec.node_id].name
            if not status:
                return ""
            return f"the agent of {name} ended with {status_in_words(status)}: {tail_of(stderr)}"


@contextmanager
def _daemon_may_end() -> Iterator[None]:
    """Ignore SIGHUP, with which Spark's daemon of Python workers ends them all as it ends.

    Spark 4.3 ends it, and starts another, when a job is cancelled while one of its tasks waits for
    a new worker: `PythonWorkerFactory.createThroughDaemon` takes the interrupted wait for a timeout
    (SPARK-54711). The agent ends with the executor, and this task with its agent.
    """
    usual = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, usual)


def _leave(process: subprocess.Popen[bytes]) -> None:
    """Let an agent live on without its task. This worker, which Spark keeps, stays its parent."""
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()
    threading.Thread(target=process.wait, name="sparkdl-agent-end", daemon=True).start()
