"""The Spark task of a node: starts an agent on its executor, and stays with it or lets it go.

Runs in: feeder
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from sparkdl.control.messages import Refused
from sparkdl.core.errors import LaunchError
from sparkdl.core.spec import ClusterSpec
from sparkdl.node.check import Problem, check_executor, parse_problem
from sparkdl.node.resources import assigned_gpus, executor_jvm_pid
from sparkdl.node.spec import AgentSpec, StatusLine, start_agent, tail_of

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger(__name__)

NODE_SCHEMA = "node_id long"
"""Spark schema of what a node's task returns."""


@dataclass(frozen=True)
class NodeTask:
    """For `DataFrame.mapInArrow` over one partition for each node that Spark runs, in their order.

    Attributes:
        payload: the pickled `(map_fun, args)`.
        node_ids: by partition.
    """

    url: str
    token: str = field(repr=False)
    spec: ClusterSpec
    payload: bytes = field(repr=False)
    node_ids: tuple[int, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run one node; `batches` only carries the partition."""
        import pyarrow as pa
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        node_id = self.node_ids[context.partitionId()]
        attempt, has_been_there = context.attemptNumber(), False
        try:
            check_executor(self.spec, self.url)
            has_been_there = True
            self._run(node_id, attempt)
        except LaunchError as error:
            problem = parse_problem(str(error))
            # A driver that was there and is not has ended the cluster: nobody wants to know.
            if problem is None or attempt or not (self._tell(problem) or has_been_there):
                raise
        yield pa.RecordBatch.from_pydict({"node_id": [node_id]})

    def _tell(self, problem: Problem) -> bool:
        """Tell the driver why the node cannot start; return whether it knows now.

        Otherwise Spark would try four times, and print all of its tracebacks.
        """
        from sparkdl.control.client import CoordinatorClient

        refused = Refused(problem.kind, problem.text)
        lease_s = self.spec.settings.lease_s
        try:
            asyncio.run(CoordinatorClient.say(self.url, self.token, lease_s, refused))
        except LaunchError:
            return False
        return True

    def _run(self, node_id: int, attempt: int) -> None:
        order = AgentSpec(
            url=self.url,
            token=self.token,
            node_id=node_id,
            spec=self.spec,
            owner="task",
            attempt=attempt,
            executor_pid=_jvm_pid(self.spec),
            gpus=assigned_gpus(),
        )
        # Spark may not repeat a task often, and would end the other nodes' tasks with this one.
        for tries_left in reversed(range(self.spec.settings.max_restarts + 1)):
            ending = self._run_agent(order)
            if not ending:
                return
            if not tries_left:
                raise LaunchError(ending)
            _log.warning("%s. Starting another one", ending)

    def _run_agent(self, order: AgentSpec) -> str:
        """Start an agent and stay with it; return how it ended, empty if in order.

        One that was detached goes on without its task.

        Raises:
            LaunchError: with the `Problem` that it had.
        """
        with tempfile.TemporaryFile() as stderr:
            process = start_agent(order, self.payload, sys.path, stderr.fileno())
            assert process.stdout is not None
            problem, work_dir = None, ""
            for line in process.stdout:
                news = msgspec.json.decode(line, type=StatusLine)
                problem = Problem(news.kind, news.error) if news.error else problem
                work_dir = news.work_dir or work_dir
                if news.is_detached:
                    return ""
            status = process.wait()
            if work_dir:
                shutil.rmtree(work_dir, ignore_errors=True)
            if problem and status:
                raise problem.error()
            name = self.spec.nodes[order.node_id].name
            if not status:
                return ""
            return f"the agent of {name} ended with status {status}: {tail_of(stderr)}"


def _jvm_pid(spec: ClusterSpec) -> int | None:
    pid = executor_jvm_pid()
    if pid is None and spec.placement == "detached":
        raise LaunchError(
            "a detached node watches its executor's JVM, and none is among this process's "
            "parents; use placement='attached'"
        )
    return pid
