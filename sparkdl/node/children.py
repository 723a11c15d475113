"""A node's child: one process after another, each with its pipe, log and port.

Runs in: agent
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

from sparkdl.control.channel import Beat, ChildPipe, Local, Start
from sparkdl.control.lease import beat_s
from sparkdl.core.settings import Environment, visible_gpus
from sparkdl.core.world import FIRST_TIME, Resume, World
from sparkdl.frameworks.framework import framework_named
from sparkdl.node.forks import CAN_FORK
from sparkdl.node.gpus import share_gpus
from sparkdl.node.no_spark import FILES
from sparkdl.node.resources import own_host, reserve_port
from sparkdl.node.spec import AgentSpec
from sparkdl.node.supervisor import Child, ChildSpec

_log = logging.getLogger(__name__)


class NodeChild:
    """The child of a node. It runs once this is made; the owner calls `close`.

    Args:
        payload: the file with the user's code.
        on_message: takes the child's messages, with a descriptor or -1.
        on_exit: takes `Popen.returncode`, after the last message.

    Attributes:
        host: the node's address.
        generation: the generation of `process`, the child started last.
        rank: in the last world given to a child of this node; -1 before the first one.
        resume: where that world began.

    Raises:
        ConfigError, FrameworkMissingError: if the node cannot have its GPUs or its port.
    """

    def __init__(
        self,
        agent_spec: AgentSpec,
        payload: Path,
        on_message: Callable[[Local, int], None],
        on_exit: Callable[[int], None],
    ) -> None:
        spec, node = agent_spec.spec, agent_spec.node
        self._spec, self._payload = agent_spec, payload
        self._on_message, self._exited = on_message, on_exit
        self.host = own_host(agent_spec.address, Environment.read())
        pid = None if spec.shares_gpus else agent_spec.executor_pid
        executor = f"{agent_spec.executor}-{pid}" if pid else ""
        self._gpus = share_gpus(spec.gpus_of(node), agent_spec.gpus, node.name, executor)
        environment = {"PYTHONUNBUFFERED": "1", FILES: agent_spec.spark_files}
        environment |= self._gpus.environment
        self._child_spec = ChildSpec(spec.framework, environment, spec.preload, node.name)
        # YARN counts pages that processes share for each of them, and ends a container by the sum.
        has_server = CAN_FORK and not Environment.read().is_yarn
        self._forks = has_server and spec.settings.can_restart
        self.rank, self.resume = -1, FIRST_TIME
        self._start(0)
        self._beat()

    def restart(self, generation: int) -> None:
        """Start another child in the place of the one that has ended."""
        self.process.close()
        self._port.close()
        # Another port in each round: the last one may have been lost to another process.
        self._start(generation)

    def begin(self, world: World, resume: Resume) -> None:
        """Give the child its world, the user's code and its port."""
        node, framework = self._spec.node, framework_named(self._spec.spec.framework)
        self.rank, self.resume = world.member(node.node_id).rank, resume
        own = {"SPARKDL_NODE": node.name, "SPARKDL_AGENT_PID": str(os.getpid())}
        about = (world, node.node_id, self._spec.spec, resume, str(self._payload), own)
        # Some servers want a descriptor of the port that is the only one.
        port = os.dup(self._port.fileno()) if framework.shares_port else self._port.detach()
        self.send(Start(*about), port)

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs that the child uses, as far as they are known: UUIDs, or Spark's numbers."""
        return visible_gpus(self._gpus.environment) or ()

    @property
    def port(self) -> int:
        """The node's port, reserved for a child that has not begun."""
        return int(self._port.getsockname()[1])

    def send(self, message: Local, fd: int = -1) -> None:
        """Send a message to the child; `fd` is its pipe's from here on."""
        self._pipe.send(message, fd)

    def say(self, text: str) -> None:
        """Add a line of sparkdl's to what the child prints."""
        self.process.log.add(f"sparkdl: {text}")

    def close(self) -> None:
        """End the child's remaining processes, and release its port and GPUs."""
        self._beating.cancel()
        self._pipe.close()
        self.process.close()
        self._port.close()
        self._gpus.close()

    def _start(self, generation: int) -> None:
        self.generation = generation
        self._port = reserve_port(self.host, Environment.read())
        loop = asyncio.get_running_loop()
        process = self._fork(loop) if self._forks else None
        if process is None:
            process = Child.spawn(self._child_spec)
            process.watch(loop, self._on_exit)
        self.process = process
        self._pipe = ChildPipe(loop, self.process.sock, self._on_message)
        if self._gpus.note:
            self.say(self._gpus.note)

    def _fork(self, loop: asyncio.AbstractEventLoop) -> Child | None:
        try:
            return Child.fork(loop, self._child_spec, self._on_exit)
        except OSError as error:  # the path of its socket may be too long, for example
            _log.warning("No fork server can be had, so restarts are slower: %s", error)
            self._forks = False
            return None

    def _on_exit(self, status: int) -> None:
        self._pipe.close()  # reads the child's last words first
        self._exited(status)

    def _beat(self) -> None:
        self.send(Beat())
        wait_s = beat_s(self._spec.spec.settings.lease_s)
        self._beating = asyncio.get_running_loop().call_later(wait_s, self._beat)
