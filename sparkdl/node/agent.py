"""The process that owns a node: keeps its child, receives its feed, talks to the coordinator.

Runs in: agent

`python -m sparkdl.node.agent`, with an `AgentSpec` and the user's code on standard input. It
decides in `node/state.py`; this file performs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import platform
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sparkdl.control.channel import (
    Beat,
    Checkpointed,
    Commit,
    Committed,
    Gathered,
    Given,
    Local,
    Raised,
    Returned,
    Running,
    Start,
)
from sparkdl.control.lease import beat_s
from sparkdl.control.messages import (
    AllGathered,
    Begin,
    CheckpointCommit,
    CheckpointDone,
    CheckpointPart,
    ChildFailed,
    ChildReturned,
    ChildRunning,
    Detach,
    Detached,
    FetchLog,
    FetchStacks,
    FromAgent,
    Gather,
    Hello,
    LastLines,
    LogLines,
    LogTail,
    NewRound,
    Offer,
    Stacks,
    Stop,
    StopChild,
    ToAgent,
)
from sparkdl.core.checkpoint import FIRST_TIME
from sparkdl.core.errors import ProtocolError, SparkdlError
from sparkdl.core.failure import Failure
from sparkdl.core.settings import Environment
from sparkdl.core.spec import InputMode
from sparkdl.frameworks.registry import framework_named
from sparkdl.node import state as states
from sparkdl.node.activity import Activity, log_period_s
from sparkdl.node.gpus import share_gpus
from sparkdl.node.logs import ChildLog
from sparkdl.node.pipe import ChildPipe
from sparkdl.node.resources import feed_disk, feed_memory, own_host, reserve_port, work_root
from sparkdl.node.spec import AgentSpec, StatusLine, read_order, write_private
from sparkdl.node.supervisor import Child, ChildSpec, watch_pid
from sparkdl.node.tensorboard import TensorBoard

if TYPE_CHECKING:
    from sparkdl.control.client import CoordinatorClient

_log = logging.getLogger(__name__)

LOG_PERIOD_S = 0.25
ANSWERING_S = 0.25
"""How often to look whether results are still being read."""
MAX_LAST_LINES = 1000
"""Of a child that has ended: what the driver keeps of its output."""


class Agent:
    """One node. `run` returns when the node has ended."""

    def __init__(self, order: AgentSpec, payload: bytes, work_dir: Path) -> None:
        self._order = order
        self._spec = order.spec
        self._node = order.spec.nodes[order.node_id]
        self._work_dir = work_dir
        self._payload = work_dir / "payload"
        write_private(self._payload, payload)
        self._environment = Environment.read()
        host, _, port = order.url.rpartition("//")[2].rpartition(":")
        self._host = own_host((host.strip("[]"), int(port)), self._environment)
        self._gpus = share_gpus(self._spec.gpus_of(self._node), order.gpus, self._node.name)
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._end_reason = ""
        self.was_cut_off = False
        self._rank = -1
        self._resume = FIRST_TIME
        self._child: Child | None = None
        self._said_s = 0.0
        self._num_children = 0
        self._pipe: ChildPipe | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unsent: list[FromAgent] = []
        self._client: CoordinatorClient | None = None
        self._board: TensorBoard | None = None
        self._activity = Activity(
            self._loop, self._tell, log_period_s(order.spec.settings.hang_timeout_s)
        )
        self._old_board: asyncio.Task[None] | None = None
        self._state, actions = states.begin()
        self._perform(actions)  # before the heavy imports: the child's own are what takes long

        from sparkdl.control.client import CoordinatorClient
        from sparkdl.feed.store.endpoint import NodeFeeds
        from sparkdl.feed.store.store import StoreLimits

        self._connect = CoordinatorClient.connect
        settings = self._spec.settings
        store = StoreLimits(
            feed_memory(settings.feed_memory_nbytes),
            feed_disk(settings.feed_disk_nbytes, work_dir),
            work_dir,
            keeps=settings.max_restarts > 0,
        )
        self._feeds = NodeFeeds(
            store,
            settings.feed_timeout_s,
            self._send_to_child,
            self._tell,
        )

    async def run(self) -> str:
        """Serve until the end; return its reason."""
        self._watch_owner()
        self._beat()
        listener: asyncio.Task[None] | None = None
        try:
            await self._join()
            listener = asyncio.ensure_future(self._listen())
            if self._spec.log_to_driver:
                self._loop.call_later(LOG_PERIOD_S, self._stream_log)
            await self._ended.wait()
        finally:
            if listener:
                listener.cancel()
            await self._clean_up()
        return self._end_reason

    def handle(self, event: states.Event) -> None:
        """Let the state machine decide, and do what it says."""
        self._state, actions = states.step(self._state, event, time.monotonic())
        self._perform(actions)
        if self._timer:
            self._timer.cancel()
            self._timer = None
        wait_s = self._state.deadline_s - time.monotonic()
        if not math.isinf(wait_s):
            self._timer = self._loop.call_later(
                max(0.0, wait_s), self.handle, states.DeadlinePassed()
            )

    # Performing.

    def _perform(self, actions: list[states.Action]) -> None:  # noqa: C901 (one case an action)
        for action in actions:
            match action:
                case states.Spawn(generation, is_again):
                    self._spawn(generation, is_again)
                case states.StartChild(world, resume):
                    self._rank = world.member(self._order.node_id).rank
                    self._resume = resume
                    self._send_to_child(Start(world, self._order.node_id, self._spec, resume))
                    self._begin_board()
                case states.Terminate():
                    self._signal_child(signal.SIGTERM)
                case states.Kill():
                    self._signal_child(signal.SIGKILL)
                case states.TellRunning(generation):
                    self._tell(ChildRunning(generation, self._child.pid if self._child else 0))
                case states.TellReturned(generation, returned):
                    self._tell(ChildReturned(generation, returned.result, returned.problem))
                case states.TellFailed(generation, failure, status):
                    self._tell_failed(generation, failure or self._failure(status or 0))
                case states.CloseFeeds(reason):
                    outcome = getattr(self._state, "outcome", None)
                    self._feeds.close(reason, has_failed=not isinstance(outcome, Returned))
                case states.End(reason):
                    self._end_reason = reason
                    self._ended.set()

    def _spawn(self, generation: int, is_again: bool) -> None:
        port = self._child.close(keeps_port=is_again) if self._child else None
        port = port or reserve_port(self._host, self._environment)
        self._num_children += 1
        self._said_s = 0.0
        if self._child:
            self._child.log.close()
        log = ChildLog()
        log.watch(self._loop)
        if self._gpus.note:
            log.add(f"sparkdl: {self._gpus.note}")
        framework, environment = self._spec.framework, self._child_environment()
        child = Child.spawn(ChildSpec(framework, self._payload, log, port, environment))
        self._child = child
        self._activity.begin(generation, log)
        self._pipe = ChildPipe(self._loop, child.sock, self._on_child_message)
        if generation or is_again:
            self._feeds.reopen(generation)
        self._tell(Offer(generation, child.port))
        if not framework_named(framework).shares_port:
            child.let_go_of_port()
        child.watch(self._loop, self._on_child_exit)

    def _child_environment(self) -> dict[str, str]:
        own = {"PYTHONUNBUFFERED": "1", "SPARKDL_NODE": self._node.name}
        return {**own, **self._gpus.environment}

    def _signal_child(self, number: int) -> None:
        if self._child:
            self._child.signal_group(number)

    def _send_to_child(self, message: Local, fd: int = -1) -> None:
        if self._pipe:
            self._pipe.send(message, fd)
        elif fd >= 0:
            os.close(fd)

    def _tell(self, message: FromAgent) -> None:
        if self._client:
            self._client.send(message)
        else:
            self._unsent.append(message)

    def _tell_failed(self, generation: int, failure: Failure) -> None:
        assert self._child is not None
        complete = replace(
            failure,
            node=self._node.name,
            node_id=self._order.node_id,
            rank=self._rank,
            host=self._host,
            generation=generation,
            step=self._step(failure),
            log_tail=failure.log_tail if failure.traceback else self._tail(),
        )
        age_s = time.monotonic() - self._said_s if self._said_s else 0.0
        self._tell(ChildFailed(generation, complete, age_s))

    def _tail(self) -> tuple[str, ...]:
        assert self._child is not None
        return self._child.log.tail(self._spec.settings.log_tail_lines)

    def _step(self, failure: Failure) -> int:
        at = self._resume.checkpoint
        return (at.step if at else 0) + max(failure.step, self._feeds.steps)

    def _failure(self, status: int) -> Failure:
        """Describe a child that ended without a word."""
        assert self._child is not None
        at, pid, node = time.time(), self._child.pid, self._node.name
        if status >= 0:
            return Failure(node, "exit", "", at, pid=pid, exit_code=status)
        kind = "oom" if self._child.was_oom_killed(status) else "signal"
        return Failure(node, kind, "", at, pid=pid, signal_number=-status)  # type: ignore[arg-type]

    # What happens.

    def _on_child_message(self, message: Local, fd: int) -> None:
        if isinstance(message, Running):
            self.handle(states.ChildEnteredMapFun())
        elif isinstance(message, Returned):
            self.handle(states.ChildSaidHowItEnded(message))
        elif isinstance(message, Raised):
            self._said_s = time.monotonic()
            failure = replace(message.failure, log_tail=self._tail())
            assert self._child is not None
            self._child.log.add(failure.traceback.rstrip())  # for who reads the log alone
            self.handle(states.ChildSaidHowItEnded(failure))
        elif isinstance(message, Checkpointed | Committed):
            self._on_checkpoint(message)
        elif isinstance(message, Given):
            if self._begun is not None:
                self._tell(Gather(self._begun, message.number, message.value))
        else:
            self._activity.note(message)
            self._feeds.on_child_message(message, fd)

    def _on_checkpoint(self, message: Checkpointed | Committed) -> None:
        if self._begun is None:
            return  # of a child that is being ended
        if isinstance(message, Committed):
            self._tell(CheckpointDone(self._begun, message.step, message.url))
        else:
            feeds = self._feeds.coverage(message.feeds)
            self._tell(CheckpointPart(self._begun, message.step, feeds, message.problem))

    @property
    def _begun(self) -> int | None:
        """The generation of the child that runs `map_fun`; `None` while none does."""
        return self._state.generation if isinstance(self._state, states.Begun) else None

    def _on_child_exit(self, status: int) -> None:
        if self._pipe:
            self._pipe.close()  # reads the child's last words first
        self._stream_log(is_last=True)
        if self._child:
            self._tell(LastLines(self._child.log.tail(MAX_LAST_LINES)))
        self.handle(states.ChildExited(status))

    def _on_driver_message(self, message: ToAgent) -> None:  # noqa: C901 (one case a message)
        match message:
            case Begin(world, resume):
                self.handle(states.WorldBegan(world, resume))
            case NewRound(generation, is_again):
                self.handle(states.RoundAsked(generation, is_again))
            case StopChild(generation, reason):
                grace_s = self._spec.settings.grace_s
                self.handle(states.ChildStopAsked(generation, grace_s, reason))
            case Stop(grace_s, is_patient):
                self._stop(grace_s, is_patient)
            case CheckpointCommit(generation, step, manifest, missing, problem):
                if self._begun == generation:
                    self._send_to_child(Commit(step, manifest, missing, problem))
            case AllGathered(generation, number, values, problem):
                if self._begun == generation:
                    self._send_to_child(Gathered(number, values, problem))
            case Detach():
                self._detach()
            case FetchLog(request, lines):
                tail = self._child.log.tail(lines) if self._child else ()
                self._tell(LogTail(request, tail))
            case FetchStacks(request):
                self._tell_stacks(request)
            case _:
                self._feeds.on_driver_message(message)

    def _stop(self, grace_s: float, is_patient: bool) -> None:
        if is_patient and self._feeds.is_answering:
            self._loop.call_later(ANSWERING_S, self._stop, grace_s, is_patient)
        else:
            self.handle(states.StopAsked(grace_s))

    def _beat(self) -> None:
        self._send_to_child(Beat())
        self._loop.call_later(beat_s(self._spec.settings.lease_s), self._beat)

    def _tell_stacks(self, request: int) -> None:
        def tell(text: str) -> None:
            self._tell(Stacks(request, text))

        if self._child:
            self._child.stacks.ask(self._loop, self._child.pid, tell)
        else:
            tell("there is no child")

    def _orphan(self, reason: str) -> None:
        _log.info("%s ends: %s", self._node.name, reason)
        self.handle(states.Orphaned(reason))

    def _watch_owner(self) -> None:
        def readable() -> None:
            self._loop.remove_reader(0)
            self._orphan(f"its {self._order.owner} is gone")

        self._loop.add_reader(0, readable)

    def _detach(self) -> None:
        """Let the task end without this agent, which lives as long as the executor's JVM."""
        if not self._loop.remove_reader(0):
            return  # it is detached already, or ends because its task has ended
        if self._order.executor_pid is not None:
            pid = self._order.executor_pid
            watch_pid(self._loop, pid, lambda: self._orphan("the executor is gone"))
        self._tell(Detached())
        _news(StatusLine(is_detached=True))

    def _stream_log(self, is_last: bool = False) -> None:
        if not (self._spec.log_to_driver and self._child):
            return
        while lines := self._child.log.new_lines(is_last):
            self._tell(LogLines(lines))
            if not is_last:
                break
        if not is_last and not self._ended.is_set():
            self._loop.call_later(LOG_PERIOD_S, self._stream_log)

    # The coordinator.

    async def _join(self) -> None:
        order = self._order
        address = ""
        if self._spec.input_mode is InputMode.SPARK and self._node.role.can_be_fed:
            address = self._feeds.listen(self._host, order.token)
        self._client = await self._connect(order.url, order.token, self._spec.settings.lease_s)
        hello = Hello(
            node_id=order.node_id,
            attempt=order.attempt,
            agent_id=uuid.uuid4().hex,
            host=self._host,
            pid=os.getpid(),
            data_address=address,
            python_version=platform.python_version(),
            owner=order.owner,
        )
        for message in (hello, *self._unsent):
            self._client.send(message)

    async def _listen(self) -> None:
        assert self._client is not None
        try:
            async for message in self._client.messages():
                self._on_driver_message(message)
            self.was_cut_off = not self._ended.is_set()
            self._orphan("the connection to the driver ended")
        except ProtocolError as error:
            self.was_cut_off = True
            self._orphan(str(error))
        except Exception:
            _log.exception("The agent of %s failed", self._node.name)
            self._orphan("the agent failed")
            raise

    def _begin_board(self) -> None:
        log_dir = self._spec.tensorboard
        if self._rank == 0 and log_dir is not None and self._board is None:
            log_dir = log_dir or f"tensorboard_{self._order.node_id}"
            self._board = TensorBoard(log_dir, self._host, self._environment.board_port)
            self._board.begin(self._tell)
        elif self._rank != 0 and self._board is not None:  # another node is the first one now
            self._old_board = self._loop.create_task(self._board.close())
            self._board = None

    async def _clean_up(self) -> None:
        self._signal_child(signal.SIGKILL)
        self._feeds.shut_down()
        self._activity.close()
        if self._board:
            await self._board.close()
        if self._client:
            await self._client.close()
        if self._pipe:
            self._pipe.close()
        if self._child:
            self._child.close()
            self._child.log.close()
        self._gpus.close()


def _news(news: StatusLine) -> None:
    """Tell whoever started this agent; it may have stopped listening."""
    try:
        sys.stdout.buffer.write(msgspec.json.encode(news) + b"\n")
        sys.stdout.buffer.flush()
    except OSError:
        _log.debug("Nobody listens to this agent's standard output")


def _allow_descriptors() -> None:
    """Have as many descriptors as this process may: each segment of a feed has one."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> int:
    """Run one agent; return its exit status: not 0 if whoever started it is to start another."""
    order, payload = read_order(sys.stdin.buffer)
    _allow_descriptors()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s agent {order.node_id} %(message)s")
    work_dir = Path(tempfile.mkdtemp(prefix="sparkdl-", dir=work_root()))

    _news(StatusLine(work_dir=str(work_dir)))

    async def serve() -> bool:
        agent = Agent(order, payload, work_dir)
        await agent.run()
        return agent.was_cut_off and order.spec.settings.max_restarts > 0

    try:
        return int(asyncio.run(serve()))
    except Exception as error:  # noqa: BLE001 (whoever started this agent has to know)
        known = isinstance(error, SparkdlError)
        text = str(error) if known else "".join(traceback.format_exception(error))
        _news(StatusLine(error=text, kind=type(error).__name__))
        return 1
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main())
