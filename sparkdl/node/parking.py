"""The life of an agent's process: one node, and perhaps another one, of the next launch.

Runs in: agent

In between it is kept: without a node, a task, a port or a GPU, with a child that has imported
everything, and with the connection to the driver whose node it was. It ends with that connection,
with its executor, with its child, when its time is over or memory is short, and when a launch asks
for it that it does not fit.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import psutil

from sparkdl.control.channel import CheckImports, Imported, ImportsChecked, Local
from sparkdl.control.descriptors import close_fd
from sparkdl.control.messages import Kept, Stop
from sparkdl.core.errors import ProtocolError, SparkdlError
from sparkdl.node import warm
from sparkdl.node.priority import step_forward
from sparkdl.node.resources import allow_descriptors, work_root
from sparkdl.node.spare import Spare, lack_of_memory
from sparkdl.node.spec import AgentSpec, StatusLine, print_status, read_spec
from sparkdl.node.supervisor import watch_pid

if TYPE_CHECKING:
    from sparkdl.control.client import CoordinatorClient

_log = logging.getLogger(__name__)

_LOOK_S = 2.0
"""How often an agent that is kept looks whether memory is short."""
_ANSWER_S = 5.0
"""What its child gets to look at the files it has imported."""
_END_S = 5.0


@dataclass(frozen=True)
class Leftover:
    """What a node leaves that has ended in order, for another one.

    Attributes:
        client: still connected to the coordinator.
        keep_s: for how long.
    """

    spare: Spare
    client: CoordinatorClient
    keep_s: float


class Node(Protocol):
    """What an agent does while it has a node."""

    was_cut_off: bool
    leftover: Leftover | None

    async def run(self) -> str:
        """Serve until the node has ended; return why."""


NewNode = Callable[[AgentSpec, bytes, Path, Spare | None], Node]


def live(new_node: NewNode) -> int:
    """Be an agent; return the exit status of its last node: not 0 if another is to be started."""
    return asyncio.run(_live(new_node))


async def _live(new_node: NewNode) -> int:
    has = dict(os.environ)  # before anything changes it
    spare: Spare | None = None
    while True:
        with open(0, "rb", closefd=False) as stream:
            agent_spec, payload = read_spec(stream)
        status, leftover = await _serve(new_node, agent_spec, payload, spare)
        if leftover is None:
            return status
        fit = warm.Fit.of(has, agent_spec.spec.framework, agent_spec.spec.preload)
        kept = KeptAgent(agent_spec, fit, leftover)
        if not await kept.wait():
            return 0
        spare = leftover.spare


async def _serve(
    new_node: NewNode, agent_spec: AgentSpec, payload: bytes, spare: Spare | None
) -> tuple[int, Leftover | None]:
    allow_descriptors()
    form = f"%(asctime)s agent {agent_spec.node_id} %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, force=True)
    work_dir = Path(tempfile.mkdtemp(prefix="sparkdl-", dir=work_root()))
    print_status(StatusLine(work_dir=str(work_dir)))
    status, leftover = 1, None
    try:
        node = new_node(agent_spec, payload, work_dir, spare)
        await node.run()
        status = int(node.was_cut_off and agent_spec.spec.settings.max_restarts > 0)
        leftover = None if status else node.leftover
    except Exception as error:  # noqa: BLE001 (reported to the process that started this agent)
        known = isinstance(error, SparkdlError)
        text = str(error) if known else "".join(traceback.format_exception(error))
        print_status(StatusLine(error=text, kind=type(error).__name__))
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)
    if leftover is None:
        print_status(StatusLine(status=status))
    return status, leftover


class KeptAgent:
    """An agent without a node. `wait` returns when it has another one, or has ended all."""

    def __init__(self, agent_spec: AgentSpec, fit: warm.Fit, leftover: Leftover) -> None:
        self._loop = asyncio.get_running_loop()
        self._key = agent_spec.warm_key
        self._owner_pid = agent_spec.executor_pid
        self._fit = fit
        self._spare, self._client = leftover.spare, leftover.client
        self._has_imported = leftover.spare.has_imported
        self._keep_s = leftover.keep_s
        self._began_s = psutil.Process().create_time()
        self._ended: asyncio.Future[bool] = self._loop.create_future()
        self._checked: asyncio.Future[str] = self._loop.create_future()
        self._childs_end: asyncio.Future[int] = self._loop.create_future()
        self._closing: list[asyncio.Task[None]] = []

    async def wait(self) -> bool:
        """Wait for the next launch; return whether this agent, and its child, are of use to it."""
        listener = None
        if warm.CAN_KEEP and self._key and self._owner_pid is not None:
            listener = warm.listen(self._key, self._owner_pid)
        if listener is None:
            print_status(StatusLine(status=0))
            await self._end_all()
            return False
        self._spare.pipe.on_message = self._on_child_message
        self._spare.child.watch(self._loop, self._on_child_exit)
        self._loop.add_reader(listener, self._accept, listener)
        assert self._owner_pid is not None
        unwatch = watch_pid(self._loop, self._owner_pid, partial(self._end, "the executor is gone"))
        watches: list[asyncio.TimerHandle | asyncio.Future[None]] = [
            self._loop.call_later(self._keep_s, self._end, "nobody needed it in time"),
            asyncio.ensure_future(self._listen()),
            asyncio.ensure_future(self._watch_memory()),
        ]
        print_status(StatusLine(is_kept=True))
        self._let_go_of_task()
        self._client.send(Kept())
        is_taken = await self._ended
        if listener.fileno() >= 0:
            self._loop.remove_reader(listener)
            listener.close()
        unwatch()
        for watch in watches:
            watch.cancel()
        if is_taken:
            self._closing.append(self._loop.create_task(self._client.close()))
        else:
            await self._end_all()
        return is_taken

    def _end(self, reason: str) -> None:
        if not self._ended.done():
            _log.info("The agent that was kept ends: %s", reason)
            self._ended.set_result(False)

    async def _end_all(self) -> None:
        """Kill the child first: the driver takes the end of the connection for the end of all."""
        child, pipe = self._spare.child, self._spare.pipe
        child.watch(self._loop, self._on_child_exit)
        child.signal_group(signal.SIGKILL)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._childs_end), _END_S)
        pipe.close()
        child.close()
        await self._client.close()

    def _let_go_of_task(self) -> None:
        with open(os.devnull, "r+b", buffering=0) as nothing:
            for fd in (0, 1, 2):
                os.dup2(nothing.fileno(), fd)

    async def _listen(self) -> None:
        with suppress(ProtocolError):
            async for message in self._client.messages():
                if isinstance(message, Stop):
                    break
        self._end("the driver, or its session, needs it no more")

    async def _watch_memory(self) -> None:
        while not (problem := lack_of_memory(0)):
            await asyncio.sleep(_LOOK_S)
        self._end(problem)

    def _on_child_exit(self, status: int) -> None:
        if not self._childs_end.done():
            self._childs_end.set_result(status)
        self._end("its child has ended")

    def _on_child_message(self, message: Local, fd: int) -> None:
        close_fd(fd)
        self._has_imported |= isinstance(message, Imported)
        if isinstance(message, ImportsChecked) and not self._checked.done():
            self._checked.set_result(message.changed)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            sock, _address = listener.accept()
            self._loop.remove_reader(listener)  # who comes next finds it taken, or gone
            self._closing.append(self._loop.create_task(self._meet(sock, listener)))

    async def _meet(self, sock: socket.socket, listener: socket.socket) -> None:
        with sock:
            try:
                needs, fds = warm.receive_needs(sock, self._key)
            except (OSError, ProtocolError, ValueError) as error:
                _log.warning("Refused who asked for this agent: %s", error)
                self._loop.add_reader(listener, self._accept, listener)
                return
            try:
                problem = await self._problem(needs)
                listener.close()  # whoever comes next looks for another one at once
                warm.answer(sock, problem)
                if not problem:
                    for number, fd in enumerate(fds):
                        os.dup2(fd, number)
            except Exception as error:  # noqa: BLE001 (an agent that is kept may end; not hang)
                problem = f"who asked for it cannot have it: {error!r}"
            finally:
                for fd in fds:
                    close_fd(fd)
        if problem:
            self._end(problem)
        elif not self._ended.done():
            self._ended.set_result(True)

    async def _problem(self, needs: warm.Fit) -> str:
        """Return why this agent or its child cannot serve a launch."""
        if problem := warm.misfit(self._fit, needs):
            return problem
        if changed := warm.changed_since(self._began_s):
            return f"{changed} has changed since it was imported"
        step_forward(self._spare.child.pid)
        if not self._has_imported:
            return ""  # it is still about to
        self._spare.pipe.send(CheckImports())
        try:
            changed = await asyncio.wait_for(self._checked, _ANSWER_S)
        except asyncio.TimeoutError:
            return "its child does not answer"
        if self._ended.done():
            return "it ends"
        return f"{changed} has changed since it was imported" if changed else ""
