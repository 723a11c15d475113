"""The process that owns a node: keeps its child, receives its feed, talks to the coordinator.

Runs in: agent

`python -m sparkdl.node.agent`, with an `AgentSpec` and the user's code on standard input. It
decides in `node/state.py`; this file performs.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import platform
import shutil
import signal
import socket
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdl.control import channel, messages
from sparkdl.control.lease import beat_s
from sparkdl.core.errors import ProtocolError, SparkdlError
from sparkdl.core.failure import UNKNOWN_STATUS, Failure, FailureKind, unknown_end
from sparkdl.core.settings import Environment, visible_gpus
from sparkdl.core.throttle import Throttle, period_s
from sparkdl.core.trace import now_us
from sparkdl.core.world import FIRST_TIME
from sparkdl.frameworks.framework import framework_named
from sparkdl.node import state as states
from sparkdl.node.activity import Activity, log_period_s
from sparkdl.node.children import Children
from sparkdl.node.forking import Place
from sparkdl.node.gpus import share_gpus
from sparkdl.node.load import LoadWatch
from sparkdl.node.noise import printed, without_noise
from sparkdl.node.profiles import Profiles
from sparkdl.node.resources import (
    allow_descriptors,
    feed_disk,
    feed_memory,
    own_host,
    reserve_port,
    work_root,
)
from sparkdl.node.spec import (
    AgentSpec,
    StatusLine,
    forget_agents_threads,
    print_status,
    read_spec,
    write_private,
)
from sparkdl.node.supervisor import Child, ChildSpec, watch_pid
from sparkdl.node.tensorboard import TensorBoard

if TYPE_CHECKING:
    from sparkdl.control.client import CoordinatorClient

_log = logging.getLogger(__name__)

LOG_PERIOD_S = 0.25
"""What a child prints goes to the coordinator this often at most."""
ANSWERING_S = 0.25
"""How often to look whether results are still being read."""
MAX_LAST_LINES = 1000
"""Of a child that has ended: what the driver keeps of its output."""


class Agent:
    """One node. `run` returns when the node has ended.

    Args:
        place: of the zygote that forks its children.
    """

    def __init__(
        self, agent_spec: AgentSpec, payload: bytes, work_dir: Path, place: Place | None = None
    ) -> None:
        self._agent_spec = agent_spec
        self._spec = agent_spec.spec
        self._node = agent_spec.spec.nodes[agent_spec.node_id]
        self._payload = work_dir / "payload"
        write_private(self._payload, payload)
        self._environment = Environment.read()
        host, _, port = agent_spec.url.rpartition("//")[2].rpartition(":")
        self._host = own_host((host.strip("[]"), int(port)), self._environment)
        self._gpus = share_gpus(self._spec.gpus_of(self._node), agent_spec.gpus, self._node.name)
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._end_reason = ""
        self.was_cut_off = False
        self._rank = -1
        self._resume = FIRST_TIME
        self._child: Child | None = None
        self._children = self._new_children(place)
        self._port = socket.socket()
        self._raised_s = 0.0
        self._pipe: channel.ChildPipe | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._beating: asyncio.TimerHandle | None = None
        self._unwatch: Callable[[], None] = lambda: None
        self._unsent: list[messages.FromAgent] = []
        self._client: CoordinatorClient | None = None
        self._board: TensorBoard | None = None
        settings, nodes = self._spec.settings, len(self._spec.nodes)
        log_s = log_period_s(settings.recovery.hang_timeout_s)
        self._activity = Activity(self._loop, self._report, log_s, nodes)
        self._prints = Throttle(self._loop, self._stream_log, period_s(LOG_PERIOD_S, nodes))
        self._profiles = Profiles(self._loop, self._report, self._node.name)
        self._load: LoadWatch | None = None
        self._old_board: asyncio.Task[None] | None = None
        self._state, actions = states.begin()
        self._perform(actions)  # before the heavy imports: the child's own are what takes long

        from sparkdl.control.client import CoordinatorClient
        from sparkdl.feed.store.store import StoreLimits
        from sparkdl.feed.transfer.endpoint import NodeFeeds
        from sparkdl.feed.transfer.fetch import Peers

        self._connect = CoordinatorClient.connect
        memory = feed_memory(settings.feeding.memory_nbytes)
        disk = feed_disk(settings.feeding.disk_nbytes, work_dir)
        store = StoreLimits(memory, disk, work_dir, keeps=settings.max_restarts > 0)
        peers = Peers(
            agent_spec.node_id,
            tuple(node.name for node in self._spec.nodes),
            agent_spec.token,
            agent_spec.url,
            agent_spec.tls.trust if agent_spec.tls else None,
            settings.recovery.host_timeout_s,
        )
        timeout_s = settings.feeding.timeout_s
        self._feeds = NodeFeeds(peers, store, timeout_s, self._send_to_child, self._report)
        if self._spec.is_watched:
            self._watch_load()

    def _watch_load(self) -> None:
        gpus = visible_gpus(self._gpus.environment) or ()
        budget = self._feeds.store.budget
        self._load = LoadWatch(
            *(self._loop, self._report, len(self._spec.nodes), gpus),
            lambda: (budget.used_nbytes, budget.limit_nbytes),
        )

    async def run(self) -> str:
        """Serve until the end; return its reason."""
        self._watch_owner()
        self._beat()
        serving = asyncio.ensure_future(self._serve())
        ended = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not self._ended.is_set():
                serving.result()  # it could not join
        finally:
            serving.cancel()
            ended.cancel()
            await self._clean_up()
        return self._end_reason

    async def _serve(self) -> None:
        await self._join()
        await self._listen()

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
                case states.Spawn(generation):
                    self._spawn(generation)
                case states.StartChild(world, resume):
                    self._rank = world.member(self._node.node_id).rank
                    self._resume = resume
                    node = (world, self._node.node_id, self._spec, resume)
                    own = {"SPARKDL_NODE": self._node.name, "SPARKDL_AGENT_PID": str(os.getpid())}
                    message = channel.Start(*node, str(self._payload), own)
                    self._send_to_child(message, self._childs_port())
                    self._begin_board()
                case states.Terminate():
                    self._signal_child(signal.SIGTERM)
                case states.Kill():
                    self._signal_child(signal.SIGKILL)
                case states.ReportRunning(generation):
                    self._report(
                        messages.ChildRunning(generation, self._child.pid if self._child else 0)
                    )
                case states.ReportReturned(generation, returned):
                    value = (returned.result, returned.problem, returned.exited_at)
                    self._report(messages.ChildReturned(generation, *value))
                case states.ReportFailed(generation, failure, status):
                    self._report_failure(generation, failure or self._failure(status or 0))
                case states.CloseFeeds(reason):
                    outcome = getattr(self._state, "outcome", None)
                    self._feeds.close(reason, has_failed=not isinstance(outcome, channel.Returned))
                case states.End(reason):
                    self._end_reason = reason
                    self._ended.set()

    def _new_children(self, place: Place | None) -> Children:
        environment = {"PYTHONUNBUFFERED": "1", **self._gpus.environment}
        spec = ChildSpec(self._spec.framework, environment, self._spec.preload, self._node.name)
        settings, say = self._spec.settings, self._add_to_log
        return Children(self._loop, spec, settings, place, say)

    def _spawn(self, generation: int) -> None:
        if self._child:
            self._child.close()
        self._port.close()
        self._port = reserve_port(self._host, self._environment)
        self._raised_s = 0.0
        self._child, self._pipe = self._children.start(self._on_child_message, self._on_child_exit)
        self._activity.begin(generation, self._child.log)
        self._child.log.watch(self._loop, self._on_child_print)
        if self._gpus.note:
            self._add_to_log(self._gpus.note)
        if generation:
            self._feeds.reopen(generation)
        self._report(messages.Offer(generation, int(self._port.getsockname()[1])))

    def _childs_port(self) -> int:
        """Return a descriptor of the port, for the child: the only one if servers want it so."""
        if framework_named(self._spec.framework).shares_port:
            return os.dup(self._port.fileno())
        return self._port.detach()

    def _add_to_log(self, text: str) -> None:
        if self._child:
            self._child.log.add(f"sparkdl: {text}")

    def _signal_child(self, number: int) -> None:
        if self._child:
            self._child.signal_group(number)

    def _send_to_child(self, message: channel.Local, fd: int = -1) -> None:
        if self._pipe:
            self._pipe.send(message, fd)
        elif fd >= 0:
            os.close(fd)

    def _report(self, message: messages.FromAgent) -> None:
        if self._client:
            self._client.send(message)
        else:
            self._unsent.append(message)

    def _report_failure(self, generation: int, failure: Failure) -> None:
        assert self._child is not None
        complete = replace(
            failure,
            node=self._node.name,
            node_id=self._node.node_id,
            rank=self._rank,
            host=self._host,
            generation=generation,
            step=self._step(failure),
            log_tail=failure.log_tail if failure.traceback else self._tail(self._child),
        )
        age_s = time.monotonic() - self._raised_s if self._raised_s else 0.0
        self._report(messages.ChildFailed(generation, complete, age_s))

    def _tail(self, child: Child) -> tuple[str, ...]:
        last = self._spec.settings.log_tail_lines
        return without_noise(child.log.tail(MAX_LAST_LINES), last)

    def _step(self, failure: Failure) -> int:
        at = self._resume.checkpoint
        return (at.step if at else 0) + max(failure.step, self._feeds.steps)

    def _failure(self, status: int) -> Failure:
        """Describe a child that ended without a word."""
        assert self._child is not None
        at, pid, node = time.time(), self._child.pid, self._node.name
        if status == UNKNOWN_STATUS:
            return Failure(node, "signal", unknown_end(self._child.oom_kills), at, pid=pid)
        if status >= 0:
            return Failure(node, "exit", "", at, pid=pid, exit_code=status)
        kind: FailureKind = "oom" if self._child.was_oom_killed(status) else "signal"
        log = "\n".join(self._child.log.tail(MAX_LAST_LINES))
        is_consequence = status == -signal.SIGABRT and framework_named(
            self._spec.framework
        ).is_peer_lost_in(log)
        return Failure(
            node, kind, "", at, pid=pid, signal_number=-status, is_consequence=is_consequence
        )

    # What happens.

    def _on_child_message(self, message: channel.Local, fd: int) -> None:
        assert self._child is not None
        if isinstance(message, channel.Imported) and self._load is not None:
            self._load.begin(self._child.pid)
        if isinstance(message, channel.Running):
            self.handle(states.ChildEnteredMapFun())
        elif isinstance(message, channel.Returned):
            self.handle(states.ChildReportedEnd(message))
        elif isinstance(message, channel.Raised):
            self._raised_s = message.raised_s
            failure = replace(message.failure, log_tail=self._tail(self._child))
            self._child.log.add(failure.traceback.rstrip())  # for users who read only the log
            self.handle(states.ChildReportedEnd(failure))
        elif isinstance(message, channel.Checkpointed | channel.Committed):
            self._on_checkpoint(message)
        elif isinstance(message, channel.ProfileTaken):
            self._profiles.taken(message)
        elif isinstance(message, channel.Given):
            if self._begun is not None:
                self._report(messages.Gather(self._begun, message.number, message.value))
        elif isinstance(message, messages.Traced | messages.TrainsAlone):
            self._report(message)
        else:
            self._activity.note(message)
            self._feeds.on_child_message(message, fd)

    def _on_checkpoint(self, message: channel.Checkpointed | channel.Committed) -> None:
        if self._begun is None:
            return  # of a child that is being ended
        if isinstance(message, channel.Committed):
            self._report(messages.CheckpointDone(self._begun, message.step, message.url))
        else:
            feeds = self._feeds.coverage(message.feeds)
            step, problem, batches = message.step, message.problem, message.batches
            self._report(messages.CheckpointPart(self._begun, step, feeds, problem, batches))

    @property
    def _begun(self) -> int | None:
        """The generation of the child that runs `map_fun`; `None` while none does."""
        return self._state.generation if isinstance(self._state, states.Begun) else None

    def _on_child_exit(self, status: int) -> None:
        if self._pipe:
            self._pipe.close()  # reads the child's last words first
        self._profiles.child_ended()
        if self._child:
            while self._streams_log and (lines := self._child.log.new_lines(is_last=True)):
                self._report_lines(lines)
            last = self._child.log.tail(MAX_LAST_LINES)
            self._report(messages.LastLines(self._activity.generation, last))
        self.handle(states.ChildExited(status))

    def _on_driver_message(self, message: messages.ToAgent) -> None:  # noqa: C901, PLR0912 (one case each)
        match message:
            case messages.Begin(world, resume):
                self.handle(states.WorldBegan(world, resume))
            case messages.NewRound(generation):
                self.handle(states.RoundRequested(generation))
            case messages.StopChild(generation, reason):
                grace_s = self._spec.settings.grace_s
                self.handle(states.ChildStopRequested(generation, grace_s, reason))
            case messages.Stop(grace_s, is_patient):
                self._stop(grace_s, is_patient)
            case messages.CheckpointCommit(generation, step, manifest, missing, problem):
                if self._begun == generation:
                    self._send_to_child(channel.Commit(step, manifest, missing, problem))
            case messages.AllGathered(generation, number, values, problem):
                if self._begun == generation:
                    self._send_to_child(channel.Gathered(number, values, problem))
            case messages.LoneNodes(generation):
                if self._begun == generation:
                    self._send_to_child(message)
            case messages.Detach():
                self._detach()
            case messages.FetchLog(request, lines):
                tail = self._child.log.tail(lines) if self._child else ()
                self._report(messages.LogTail(request, self._activity.generation, tail))
            case messages.FetchStacks(request):
                self._report_stacks(request)
            case messages.AskClock(sent_us):
                self._report(messages.ClockTold(sent_us, now_us()))
            case messages.FetchProfile():
                pid = (self._child.pid or None) if self._child else None
                self._profiles.take(message, pid, self._send_to_child)
            case _:
                self._feeds.on_driver_message(message)

    def _stop(self, grace_s: float, is_patient: bool) -> None:
        if self._ended.is_set():
            return
        if is_patient and self._feeds.store.is_answering:  # feeders still read results
            self._loop.call_later(ANSWERING_S, self._stop, grace_s, is_patient)
            return
        self.handle(states.StopRequested(grace_s))

    def _beat(self) -> None:
        self._send_to_child(channel.Beat())
        self._beating = self._loop.call_later(beat_s(self._spec.settings.lease_s), self._beat)

    def _report_stacks(self, request: int) -> None:
        def report(text: str) -> None:
            self._report(messages.Stacks(request, text))

        if self._child:
            self._child.stacks.ask(self._loop, self._child.pid, report)
        else:
            report("there is no child")

    def _orphan(self, reason: str) -> None:
        _log.info("%s ends: %s", self._node.name, reason)
        self.handle(states.Orphaned(reason))

    def _watch_owner(self) -> None:
        # Nothing is written to standard input after the spec: it is readable once it has ended,
        # which the kernel sees to however the owner ends.
        def readable() -> None:
            self._loop.remove_reader(0)
            self._orphan(f"its {self._agent_spec.owner} is gone")

        self._loop.add_reader(0, readable)

    def _detach(self) -> None:
        """Let the task end without this agent, which now lives as long as the executor's JVM."""
        if not self._loop.remove_reader(0):
            return  # it is detached already, or ends because its task has ended
        if self._agent_spec.executor_pid is not None:
            pid = self._agent_spec.executor_pid
            self._unwatch = watch_pid(self._loop, pid, lambda: self._orphan("the executor is gone"))
        self._report(messages.Detached())
        print_status(StatusLine(is_detached=True))

    def _on_child_print(self) -> None:
        self._activity.printed()
        if self._streams_log:
            self._prints.request()

    @property
    def _streams_log(self) -> bool:
        """Whether the driver prints or keeps the lines of this node as they come."""
        return self._spec.keeps_log or self._spec.is_printed(self._rank)

    def _stream_log(self) -> None:
        """Send new lines; after a burst the others follow."""
        if self._child and (lines := self._child.log.new_lines()):
            self._report_lines(lines)
            self._prints.request()

    def _report_lines(self, lines: tuple[str, ...]) -> None:
        self._report(printed(lines, self._spec.is_printed(self._rank)))

    # The coordinator.

    async def _join(self) -> None:
        agent_spec, tls = self._agent_spec, self._agent_spec.tls
        address = ""
        if self._spec.is_fed and self._node.role.can_be_fed:
            own_tls = tls.on_this_host() if tls else None
            address = self._feeds.listen(self._host, own_tls)
        settings = self._spec.settings
        self._client = await self._connect(
            agent_spec.url,
            agent_spec.token,
            settings.lease_s,
            settings.recovery.host_timeout_s,
            tls.trust if tls else None,
            len(self._spec.nodes),
        )
        hello = messages.Hello(
            node_id=agent_spec.node_id,
            attempt=agent_spec.attempt,
            agent_id=uuid.uuid4().hex,
            host=self._host,
            pid=os.getpid(),
            data_address=address,
            python_version=platform.python_version(),
            owner=agent_spec.owner,
        )
        for message in (hello, *self._unsent):
            self._client.send(message)

    async def _listen(self) -> None:
        assert self._client is not None
        try:
            async for message in self._client.messages():
                self._on_driver_message(message)
            self.was_cut_off = not self._ended.is_set()
            self._orphan(self._client.ended)
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
            log_dir = log_dir or f"tensorboard_{self._node.node_id}"
            self._board = TensorBoard(log_dir, self._host, self._environment.board_port)
            self._board.begin(self._report)
        elif self._rank != 0 and self._board is not None:  # another node is the first one now
            self._old_board = self._loop.create_task(self._board.close())
            self._board = None

    async def _clean_up(self) -> None:
        self._signal_child(signal.SIGKILL)  # first: what it does after this reaches nobody
        self._feeds.shut_down()
        self._activity.close()
        self._profiles.close()
        if self._load is not None:
            self._load.close()
        self._prints.cancel()
        self._loop.remove_reader(0)
        self._unwatch()
        for timer in (self._timer, self._beating):
            if timer:
                timer.cancel()
        if self._board:
            await self._board.close()
        if self._client:
            await self._client.close()
        if self._pipe:
            self._pipe.close()
        if self._child:
            self._child.close()
        self._children.close()
        self._port.close()
        self._gpus.close()


def main() -> int:
    """Run one agent; return its exit status: not 0 if another one is to be started."""
    forget_agents_threads()
    environment = dict(os.environ)  # before anything changes it
    with open(0, "rb", closefd=False) as stream:
        agent_spec, payload = read_spec(stream)
    allow_descriptors()
    form = f"%(asctime)s agent {agent_spec.node_id} %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, force=True)
    work_dir = Path(tempfile.mkdtemp(prefix="sparkdl-", dir=work_root()))
    print_status(StatusLine(work_dir=str(work_dir)))
    try:
        status = asyncio.run(_serve(agent_spec, payload, work_dir, agent_spec.place(environment)))
        print_status(StatusLine(is_over=not status))
        return status
    except Exception as error:  # noqa: BLE001 (reported to the process that started this agent)
        known = isinstance(error, SparkdlError)
        text = str(error) if known else "".join(traceback.format_exception(error))
        print_status(StatusLine(error=text, kind=type(error).__name__))
        return 1
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)


async def _serve(agent_spec: AgentSpec, payload: bytes, work_dir: Path, place: Place | None) -> int:
    agent = Agent(agent_spec, payload, work_dir, place)
    await agent.run()
    return int(agent.was_cut_off and agent_spec.spec.settings.max_restarts > 0)


if __name__ == "__main__":
    raise SystemExit(main())
