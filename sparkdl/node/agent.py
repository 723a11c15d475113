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
import shutil
import signal
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdl.control import channel, messages
from sparkdl.control.lease import driver_keep_alive
from sparkdl.core.errors import FeedClosedError, ProtocolError, SparkdlError
from sparkdl.core.failure import Failure, FailureKind
from sparkdl.core.files import LEFT, SCRATCH
from sparkdl.core.settings import Environment
from sparkdl.node import state as states
from sparkdl.node.observation import Observation
from sparkdl.node.resources import allow_descriptors, feed_disk, feed_memory, work_root
from sparkdl.node.spec import AgentSpec, StatusLine, print_status, read_spec, write_private
from sparkdl.node.supervisor import NodeChild, wait_for_stranger, watch_end
from sparkdl.node.tensorboard import TensorBoard

if TYPE_CHECKING:
    from sparkdl.control.client import CoordinatorClient
    from sparkdl.control.rows import EpochRows

_log = logging.getLogger(__name__)

_FAILURE_LINES = 40
"""The last lines of a child's output, which travel with its failure."""
ANSWERING_S = 0.25
"""How often to look whether results are still being read."""


class Agent:
    """One node. `run` returns when the node has ended."""

    def __init__(self, agent_spec: AgentSpec, payload: Path, work_dir: Path) -> None:
        on_child = self._on_child_message, self._on_child_exit
        self._child = child = NodeChild(agent_spec, payload, *on_child)
        # These imports take long. The child's own take longer, and have begun.
        from sparkdl.feed.store.store import StoreLimits
        from sparkdl.feed.transfer.endpoint import NodeFeeds
        from sparkdl.feed.transfer.fetch import NodeDirectory
        from sparkdl.feed.transfer.messages import FeedSpec

        spec, settings, report = agent_spec.spec, agent_spec.spec.settings, self._report
        self._agent_spec, self._spec = agent_spec, spec
        self._loop = asyncio.get_running_loop()
        self._state: states.State = states.Ready(child.generation)
        self._timer: asyncio.TimerHandle | None = None
        self._covering: dict[str, EpochRows] = {}
        """The rows of the checkpoint that the child has begun last."""
        self._ended = asyncio.Event()
        self.lost_driver = False
        self._outbox: asyncio.Queue[messages.FromAgent | None] = asyncio.Queue()
        self._client: CoordinatorClient | None = None
        self._left = work_dir / SCRATCH / LEFT
        memory = feed_memory(settings.feeding.memory_nbytes)
        disk = feed_disk(settings.feeding.disk_nbytes, work_dir)
        # Without restarts, no later child would read the retained rows.
        store = StoreLimits(memory, disk, work_dir, keeps=settings.can_restart)
        trust = agent_spec.tls.trust if agent_spec.tls else None
        feed_spec = FeedSpec(*("", 0, "", (), agent_spec.token), trust=trust)
        names = tuple(node.name for node in spec.nodes)
        # Longer than the driver waits for an agent that stands still, which it gives up itself.
        host_timeout_s = settings.recovery.host_timeout_s
        patience_s = driver_keep_alive(settings.lease_s, host_timeout_s).longest_s + host_timeout_s
        directory = NodeDirectory(agent_spec.node_id, names, feed_spec, patience_s)
        timeout_s = settings.feeding.timeout_s
        self._feeds = NodeFeeds(directory, store, timeout_s, child.send, report, self._fail)
        budget = self._feeds.store.budget
        self._observation = Observation(
            agent_spec, child, report, lambda: (budget.used_nbytes, budget.limit_nbytes)
        )
        self._board: TensorBoard | None = None
        if spec.tensorboard is not None:
            log_dir = spec.tensorboard or f"tensorboard_{agent_spec.node_id}"
            port = Environment.read().board_port
            self._board = TensorBoard(log_dir, child.host, port, report)
        self._lifeline = Lifeline(agent_spec, self._on_owner_lost)

    async def run(self) -> None:
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

    def handle(self, event: states.Event) -> None:
        """Perform the actions the state machine returns; do nothing once the node has ended."""
        if self._ended.is_set():
            return
        self._state, actions = states.step(self._state, event, time.monotonic())
        self._perform(actions)
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if isinstance(self._state, states.Ended):
            self._ended.set()
        elif isinstance(self._state, states.Leaving | states.Ending):
            wait_s = self._state.deadline_s - time.monotonic()
            if not math.isinf(wait_s):
                self._timer = self._loop.call_later(wait_s, self.handle, states.DeadlinePassed())

    # Performing.

    def _perform(self, actions: list[states.Action]) -> None:  # noqa: C901 (one case an action)
        for action in actions:
            match action:
                case states.Spawn(generation):
                    self._child.restart(generation)
                    self._feeds.reopen(generation)
                    self._report_ready()
                case states.StartChild(world, resume):
                    self._child.begin(world, resume)
                    if self._board:
                        self._board.follow(self._child.rank)
                case states.Terminate():
                    self._child.process.signal_group(signal.SIGTERM)
                case states.Kill():
                    self._child.process.signal_group(signal.SIGKILL)
                case states.ReportEnd(_, messages.ChildReturned() as returned):
                    self._report(returned)
                case states.ReportEnd(generation, channel.Raised(failure, raised_s)):
                    # By the child's own time: on a busy machine this agent may hear of the error
                    # later than another one hears of its consequence.
                    age_s = time.monotonic() - raised_s
                    self._report_failure(generation, failure, age_s)
                case states.ReportEnd(generation, int(status)):
                    self._report_failure(generation, self._child.process.failure(status))
                case states.CloseFeeds(reason):
                    outcome = getattr(self._state, "outcome", None)
                    has_failed = not isinstance(outcome, messages.ChildReturned)
                    self._feeds.close(reason, has_failed)

    def _report_ready(self) -> None:
        self._observation.begin()
        self._report(messages.ChildReady(self._child.generation, self._child.port))

    def _report(self, message: messages.FromAgent) -> None:
        self._outbox.put_nowait(message)

    def _report_failure(self, generation: int, failure: Failure, age_s: float = 0.0) -> None:
        child, node, at = self._child, self._agent_spec.node, self._child.resume.checkpoint
        complete = replace(
            failure,
            node=node.name,
            node_id=node.node_id,
            rank=child.rank,
            host=child.host,
            generation=generation,
            # A killed child has reported no number itself, and the agent's own may lag behind.
            step=(at.step if at else 0) + max(failure.step, self._feeds.steps),
            log_tail=failure.log_tail if failure.traceback else self._log_tail(),
        )
        self._report(messages.ChildFailed(generation, complete, age_s))

    def _fail(self, kind: FailureKind, problem: str) -> None:
        """Fail this node, whatever its child does: the driver ends that with the generation."""
        node, pid = self._agent_spec.node.name, self._child.process.pid
        failure = Failure(node, kind, problem, time.time(), pid=pid)
        if kind == "exception":
            name = FeedClosedError.__name__
            failure = replace(failure, message=f"{name}: {problem}", exception_type=name)
        self._report_failure(self._feeds.store.generation, failure)

    def _log_tail(self) -> tuple[str, ...]:
        return self._child.process.log.tail(_FAILURE_LINES)

    # What happens.

    def _on_child_message(self, message: channel.Local, fd: int) -> None:
        match message:
            case messages.ChildReturned():
                self.handle(states.ChildReportedEnd(message))
            case channel.Raised(failure, raised_s):
                # Before the traceback is added to the log, or the failure would show it twice.
                failure = replace(failure, log_tail=self._log_tail())
                # For users who read only the log.
                self._child.process.log.add(failure.traceback.rstrip())
                self.handle(states.ChildReportedEnd(channel.Raised(failure, raised_s)))
            case channel.CheckpointBegun(feeds, own):
                # Now: while the files are written, the child may end the feed and drop its rows.
                self._covering = {**self._feeds.coverage(feeds), **own}
            case channel.Checkpointed(step, problem):
                # Otherwise the child is being ended, and its part would belong to no generation.
                if self._begun is not None:
                    covered = {} if problem else self._covering
                    part = messages.CheckpointPart(self._begun, step, covered, problem)
                    self._report(part)
            case messages.ChildRunning() | messages.CheckpointDone() | messages.Gather():
                if self._begun == message.generation:  # or the child is being ended
                    self._report(message)
            case _:
                self._observation.note(message)
                self._feeds.on_child_message(message, fd)

    @property
    def _begun(self) -> int | None:
        """The generation of the child that runs `map_fun`; `None` while none does."""
        return self._state.generation if isinstance(self._state, states.Running) else None

    def _on_child_exit(self, status: int) -> None:
        self._observation.end()
        self.handle(states.ChildExited(status))

    def _on_driver_message(self, message: messages.ToAgent) -> None:
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
            case messages.CheckpointCommit() | messages.AllGathered():
                # A message for an earlier child must not reach its successor.
                if self._begun == message.generation:
                    self._child.send(message)
            case messages.Detach():
                self._detach()
            case messages.Fetch():
                self._observation.answer(message)
            case _:
                self._feeds.on_driver_message(message)

    def _stop(self, grace_s: float, is_patient: bool) -> None:
        # Asked again by a timer, since nothing reports that the last result has been read.
        # Feeders still read results, or the driver a file: it ends the cluster when it has that.
        if is_patient and (self._feeds.store.is_answering or any(self._left.glob("*"))):
            self._loop.call_later(ANSWERING_S, self._stop, grace_s, is_patient)
            return
        self.handle(states.StopRequested(grace_s))

    def _detach(self) -> None:
        """Let the task end without this agent, which now lives as long as the executor's JVM."""
        if self._lifeline.detach():
            self._report(messages.Detached())
            print_status(StatusLine(is_detached=True))

    def _on_owner_lost(self, reason: str) -> None:
        _log.info("%s ends: %s", self._agent_spec.node.name, reason)
        self.handle(states.OwnerLost(reason))

    # The coordinator.

    def _hello(self) -> messages.Hello:
        agent_spec, address = self._agent_spec, ""
        # Only a node that may get rows opens a port for them.
        if self._spec.is_fed and agent_spec.node.role.can_be_fed:
            address = self._feeds.listen(self._child.host, agent_spec.tls, self._left)
        return messages.Hello(
            node_id=agent_spec.node_id,
            task=agent_spec.task,
            agent_id=uuid.uuid4().hex,
            host=self._child.host,
            pid=os.getpid(),
            data_address=address,
            owner=agent_spec.owner,
        )

    async def _serve(self) -> None:
        from sparkdl.control.client import CoordinatorClient

        self._report(self._hello())  # before anything else
        self._report_ready()
        agent_spec, settings = self._agent_spec, self._spec.settings
        self._client = await CoordinatorClient.connect(
            agent_spec.url,
            agent_spec.token,
            settings.lease_s,
            settings.recovery.host_timeout_s,
            agent_spec.tls.trust if agent_spec.tls else None,
            self._outbox,
        )
        try:
            async for message in self._client.messages():
                self._on_driver_message(message)
            self.lost_driver = not self._ended.is_set()
            self._on_owner_lost(self._client.ended)
        except ProtocolError as error:
            self.lost_driver = True
            self._on_owner_lost(str(error))
        except Exception:
            # Whatever failed, the child must end: without its agent it would train on unseen.
            _log.exception("The agent of %s failed", agent_spec.node.name)
            self._on_owner_lost("the agent failed")
            raise

    async def _clean_up(self) -> None:
        self._child.process.signal_group(signal.SIGKILL)  # first: its work is lost now
        self._feeds.shut_down()
        self._observation.close()
        self._lifeline.detach()
        if self._timer:
            self._timer.cancel()
        if self._board:
            await self._board.close()
        # Before the driver sees the end: the next cluster may want its GPUs at once.
        self._child.close()
        if self._client:
            await self._client.close()


class Lifeline:
    """What an agent ends with: the owner of its standard input; a task's with its executor too."""

    def __init__(self, agent_spec: AgentSpec, on_end: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        pid = agent_spec.executor_pid
        if agent_spec.owner == "task" and pid is not None:
            wait = partial(wait_for_stranger, pid)
            watch_end(self._loop, wait, partial(on_end, "the executor is gone"))

        def readable() -> None:
            self._loop.remove_reader(0)
            on_end(f"its {agent_spec.owner} is gone")

        # Nothing is written to standard input after the spec: it is readable once it has ended,
        # which the kernel sees to however the owner ends.
        self._loop.add_reader(0, readable)

    def detach(self) -> bool:
        """End with the executor alone; false if that was done, or the owner has ended."""
        return self._loop.remove_reader(0)


def main() -> int:
    """Run one agent; return its exit status: not 0 if another one is to be started."""
    # The descriptor stays open: its end is what the agent ends with.
    with open(0, "rb", closefd=False) as stream:
        agent_spec, payload = read_spec(stream)
    allow_descriptors()
    form = f"%(asctime)s agent {agent_spec.node_id} %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, force=True)
    work_dir = Path(tempfile.mkdtemp(prefix="sparkdl-", dir=work_root()))
    # Reported at once: the starter deletes the folder if this process is killed.
    print_status(StatusLine(work_dir=str(work_dir)))
    try:
        return asyncio.run(_serve(agent_spec, payload, work_dir))
    except Exception as error:  # noqa: BLE001 (reported to the process that started this agent)
        known = isinstance(error, SparkdlError)
        text = str(error) if known else "".join(traceback.format_exception(error))
        print_status(StatusLine(error=text, kind=type(error).__name__))
        return 1
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)


async def _serve(agent_spec: AgentSpec, payload: bytes, work_dir: Path) -> int:
    path = work_dir / "payload"
    write_private(path, payload)
    agent = Agent(agent_spec, path, work_dir)
    await agent.run()
    # A status that is not 0 makes the task start another agent, which a restart can use.
    return int(agent.lost_driver and agent_spec.spec.settings.can_restart)


if __name__ == "__main__":
    raise SystemExit(main())
