"""The driver's thread for one cluster: agents' messages become events, decisions become messages.

Runs in: driver

It decides in `driver/lifecycle/transitions.py`; this file performs. All of it runs on one event
loop in one thread; the handle asks from other threads through `submit`, `broadcast` and `wait_for`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from sparkdl.control.cause import CutLink
from sparkdl.control.messages import (
    AskClock,
    BoardStarted,
    CheckpointDone,
    CheckpointPart,
    ChildFailed,
    ChildReturned,
    ChildRunning,
    ClockTold,
    Detached,
    FeedCovered,
    FeedEnd,
    FeedProgress,
    FetchLog,
    FetchProfile,
    FetchStacks,
    FromAgent,
    Gather,
    Hello,
    LastLines,
    LogLines,
    LogTail,
    LoneNodes,
    NodeActive,
    NodeLoad,
    Offer,
    Profiled,
    Refused,
    Spooled,
    Stacks,
    ToAgent,
    Traced,
    TrainsAlone,
)
from sparkdl.control.server import CoordinatorServer, ServerAddress
from sparkdl.control.tls import Tls
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import IllegalTransitionError
from sparkdl.core.garbage import uncollected
from sparkdl.core.spec import ClusterSpec, NodeSpec
from sparkdl.core.throttle import Throttle
from sparkdl.core.world import CheckpointRef, World
from sparkdl.driver import events
from sparkdl.driver.collect import (
    Checkpoints,
    Gatherings,
    LoneTrainers,
    PendingRequest,
    PendingRequests,
    Question,
)
from sparkdl.driver.feeds.coverage import CoverageStore
from sparkdl.driver.feeds.report import gone_beyond
from sparkdl.driver.lifecycle import state as states
from sparkdl.driver.lifecycle.roster import Roster
from sparkdl.driver.lifecycle.state import failure_of, generation_of, is_empty
from sparkdl.driver.lifecycle.transitions import begin, step
from sparkdl.driver.logs import Attempt, LastAttempts, joined
from sparkdl.driver.stream import Stream, Subscriber, notify, period_s
from sparkdl.driver.threads import Changed
from sparkdl.driver.view import Seen, View, launched, sampled
from sparkdl.node.task import Problem

_log = logging.getLogger(__name__)
T = TypeVar("T")

_THREAD_END_S = 10.0
_PROGRESS_S = 0.05
"""Who waits for progress looks again this often at most: to wake a thread costs more than a report.
"""
_MANY = 1000
"""Nodes: more than a hundred thousand objects that live as long as the cluster."""
_STATE_EVENTS = {events.Launched, events.Changed, events.Checkpoint, events.Sampled}
_FIRST_CLOCKS = 4
"""Of a host that has just joined so many answers are asked for: the fastest of them counts."""


class Controller:
    """One cluster's coordinator. `start`, use, `close`.

    Args:
        log_tail: returns the last lines of a node that are in a file; for agents that are lost.
        relaunch: called there to bring new agents for nodes; must not block.
        checkpoint: what the first world resumes from.
        release: called there once no agent will come or go any more; must not block.
        forget_task: called there with each node whose task has ended in order; must not block.
        leave_host: called there with each host that does not answer, and with those that are
            given up though they do (then the second argument is true); must not block.
        tls: what the cluster's servers show; `None` without TLS.
    """

    def __init__(  # noqa: PLR0913 (callbacks, a name each)
        self,
        spec: ClusterSpec,
        token: str,
        log_tail: Callable[[str, int], tuple[str, ...]] = lambda node, lines: (),
        relaunch: Callable[[Sequence[NodeSpec]], None] | None = None,
        checkpoint: CheckpointRef | None = None,
        release: Callable[[], None] = lambda: None,
        forget_task: Callable[[NodeSpec], None] = lambda node: None,
        leave_host: Callable[[str, bool], None] = lambda host, is_there: None,
        tls: Tls | None = None,
    ) -> None:
        self.spec = spec
        self.tls = tls
        self.changed = Changed()
        self._born_s = time.time() - time.monotonic()
        self.begun_s = self.wall_s()
        self.view = View(begin(spec, time.monotonic(), checkpoint))
        keeps = spec.settings.max_restarts > 0 or spec.checkpoint_dir is not None
        self.checkpoints = Checkpoints(spec.cluster_id, CoverageStore(keeps))
        self._gatherings = Gatherings()
        self._lone_trainers = LoneTrainers()
        self._joined: set[tuple[int, int]] = set()
        """Node and process id of each agent that has ever joined."""
        self._last = LastAttempts()
        self.address: ServerAddress | None = None
        self._log_tail = log_tail
        self._relaunch = relaunch
        self._release = release
        self._forget_task = forget_task
        self._leave_host = leave_host
        self._loop = asyncio.new_event_loop()
        self._server = CoordinatorServer(
            token,
            self,
            spec.settings.lease_s,
            spec.settings.recovery.host_timeout_s,
            tls=tls,
            num_nodes=len(spec.nodes),
        )
        self._timer: asyncio.TimerHandle | None = None
        self._requests = PendingRequests(self._server.send, self.changed)
        self._stream, self._seen = Stream(), Seen(spec.cluster_id)
        deque(self._seen.news(self.view.state, self.begun_s), maxlen=0)  # subscribers begin there
        self._clocks: dict[str, tuple[int, int]] = {}
        """Of each agent that is asked for its host's clock: its node, and how often it answered."""
        self._progress = Throttle(self._loop, self._notify, _PROGRESS_S)
        self._thread = threading.Thread(
            target=self._run, name=f"sparkdl-controller-{spec.cluster_id}", daemon=True
        )

    # From other threads.

    def start(self, host: str, ports: tuple[int, ...]) -> ServerAddress:
        """Start the thread and listen.

        Raises:
            ConfigError: if `host` and `ports` offer no place to listen at, or this process may
                not have a connection to each node.
        """
        self._thread.start()
        try:
            self.address = self._call(self._server.start(host, ports))
            self.soon(self._arm_timer, self.view.state.deadline_s)
            return self.address
        except BaseException:
            self.close()
            raise

    def submit(self, event: states.Event) -> bool:
        """Have an event handled on the controller's thread; false once that is closed."""
        return self.soon(self._handle, event)

    def broadcast(
        self, message: ToAgent, node_ids: set[int], generation: int | None = None
    ) -> None:
        """Send a message to the agents of some nodes, as long as the world is of `generation`."""
        self.soon(self._broadcast, message, node_ids, generation)

    def wait_for(self, is_true: Callable[[View], bool], deadline: Deadline) -> bool:
        """Wait until `is_true` of the view; return whether it is."""
        return self.changed.wait_for(lambda: is_true(self.view), deadline)

    def gather(self, deadline: Deadline) -> bool:
        """Wait until the world begins, or it is known that none will; return whether that is known.

        With thousands of nodes Python's collector would take a third of the driver's time, looking
        for garbage among connections that stay. So it rests meanwhile, and leaves them alone then.
        """

        def is_decided(view: View) -> bool:
            return not isinstance(view.state, states.Gathering)

        if len(self.spec.nodes) < _MANY:
            return self.wait_for(is_decided, deadline)
        with uncollected():
            found = self.wait_for(is_decided, deadline)
            gc.freeze()
        return found

    def look(self, at: Callable[[View], T]) -> T:
        """Return what `at` finds in the view."""
        with self.changed:
            return at(self.view)

    def is_lost(self, node: NodeSpec, pid: int) -> bool:
        """Whether the agent of a node, by its process id, was connected and is not any more."""
        with self.changed:
            roster = self._roster()
            agent = roster.agents.get(node.node_id) if roster else None
            is_connected = agent is not None and agent.hello.pid == pid
            return (node.node_id, pid) in self._joined and not is_connected

    @property
    def is_closed(self) -> bool:
        """Whether nothing happens any more."""
        return self._loop.is_closed()

    def subscribe(self, subscriber: Subscriber, *kinds: type[events.Event]) -> None:
        """Have `subscriber` called with all events of some kinds, the present ones first.

        It is called on the loop, so it must be quick; with `Ended` by the thread that closes this,
        for which it may wait for a limited time. What it raises is logged.
        """
        with self.changed:
            for event in self.present() if _STATE_EVENTS & {*kinds} else ():
                if type(event) in kinds:
                    notify(subscriber, event)
            is_first = events.Sampled in kinds and not self._stream.wants(events.Sampled)
            self._stream.add(subscriber, *kinds)
        if is_first:
            self.soon(self.later, period_s(len(self.spec.nodes)), self._sample)

    def present(self) -> list[events.AnyEvent]:
        """Return events that say all that the cluster is and does now, for who knows nothing."""
        with self.changed:
            now_s = self.wall_s()
            news = Seen(self.spec.cluster_id).news(self.view.state, now_s)
            sample = sampled(self.spec, now_s, self.view)
            return [launched(self.spec, self.begun_s), *news, sample]

    def publish(self, event: events.Event) -> None:
        """Have the subscribers to this kind of event called; only from the loop."""
        self._stream.publish(event)

    def soon(self, function: Callable[..., object], *arguments: Any) -> bool:
        """Have `function` called on the loop; false once the controller is closed."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            return False
        return True

    def later(
        self, wait_s: float, function: Callable[..., None], *arguments: Any
    ) -> asyncio.TimerHandle:
        """Have `function` called on the loop in `wait_s` seconds; only from there."""
        return self._loop.call_later(wait_s, function, *arguments)

    def fetch_log(self, node_id: int, lines: int, deadline: Deadline) -> tuple[str, ...]:
        """Return the last lines of a node's child; what was kept of it if the node is gone."""
        return joined(self._attempts(node_id, lines, deadline)[-1:], lines)

    def fetch_logs(self, node_id: int, lines: int, deadline: Deadline) -> tuple[str, ...]:
        """Return the same, and before it what is kept of the node's children before this one."""
        return joined(self._attempts(node_id, lines, deadline), lines)

    def _attempts(self, node_id: int, lines: int, deadline: Deadline) -> list[Attempt]:
        answer = self._ask([node_id], lambda number: FetchLog(number, lines), deadline).get(node_id)
        with self.changed:
            if answer is not None:
                return [*self._last.before(node_id, answer.generation), answer]
            kept = self._last.before(node_id)
            generation = generation_of(states.before_stop(self.view.state)) or 0
        if kept and kept[-1].generation >= generation:
            return kept
        # It is lost, and what it has not sent as well; its file has the lines of all its children.
        written = self._log_tail(self._name(node_id), lines)
        return [Attempt(generation, written)] if written else kept

    def fetch_stacks(self, deadline: Deadline) -> dict[str, str]:
        """Return by node name what its child is doing, or why that is not known."""
        return self._ask_all(FetchStacks, lambda problem: problem, deadline)

    def fetch_profiles(self, asked: FetchProfile, deadline: Deadline) -> dict[str, Profiled]:
        """Return by node name what its child has done for a while, or why that is not known."""
        return self._ask_all(
            lambda number: msgspec.structs.replace(asked, request=number),
            lambda problem: Profiled(0, problem=problem),
            deadline,
        )

    def _ask_all(
        self, question: Question, unknown: Callable[[str], T], deadline: Deadline
    ) -> dict[str, T]:
        """Ask all nodes; of those that do not answer return what `unknown` makes of the reason."""
        answers = self._ask([node.node_id for node in self.spec.nodes], question, deadline)
        silent = "its agent did not answer: it is lost or stopped, or cannot be reached"
        if self.look(lambda view: is_empty(view.state)):
            silent = "it has ended, as the cluster has"
        nodes, nothing = self.spec.nodes, unknown(silent)
        return {node.name: answers.get(node.node_id, nothing) for node in nodes}

    def wall_s(self) -> float:
        """Return the Unix time in seconds; it does not jump while the cluster lives."""
        return self._born_s + time.monotonic()

    def close(self) -> None:
        """Close all connections and end the thread."""
        if len(self.spec.nodes) >= _MANY:
            gc.unfreeze()
        ended = events.Ended(self.spec.cluster_id, self.wall_s())
        if not self._thread.is_alive():
            self._stream.end(ended)
            self._loop.close()
            return
        try:
            self._call(self._server.stop())
        finally:
            self._stream.end(ended)
        self.soon(self._loop.stop)
        self._thread.join(_THREAD_END_S)

    def _ask(self, node_ids: Iterable[int], question: Question, deadline: Deadline) -> Any:
        """Ask the agents of some nodes; return by node id what came in time."""
        request = PendingRequest(question, set(node_ids))
        if self.soon(self._send_request, request):
            self.changed.wait_for(lambda: not request.awaited, deadline)
            self.soon(self._requests.forget, request)
        with self.changed:
            return dict(request.answers)

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_THREAD_END_S)

    # From the server, on the loop.

    def joined(self, hello: Hello) -> None:
        """An agent has connected."""
        _log.debug("%s joined from %s", self._name(hello.node_id), hello.host)
        with self.changed:
            self._joined.add((hello.node_id, hello.pid))
        self._handle(states.AgentJoined(hello))
        self._note_phase(hello.agent_id, "joined", host=hello.host)
        if self.spec.is_traced:
            self._clocks[hello.agent_id] = hello.node_id, 0
            self._ask_clock(hello.agent_id)

    def refused(self, message: Refused) -> None:
        """A node cannot start where it was to."""
        problem = Problem(message.kind, message.text).at_driver()
        self._handle(states.LaunchBroke(problem))

    def said(self, agent_id: str, message: FromAgent) -> None:  # noqa: C901, PLR0912 (one case a message)
        """An agent has sent a message."""
        node_id = self._node_of(agent_id)
        match message:
            case Offer():
                self._note_phase(agent_id, "offered", message.generation)
                self._handle(states.AgentOffered(agent_id, message))
            case Detached():
                self._handle(states.AgentDetached(agent_id))
            case ChildRunning():
                self._note_phase(agent_id, "entered", message.generation)
                if node_id is not None:
                    with self.changed:
                        self.view.pids[node_id] = message.pid
                self._handle(states.ChildEntered(agent_id, message))
            case ChildReturned():
                self._note_phase(agent_id, "returned", message.generation)
                self._handle(states.ChildGaveResult(agent_id, message))
                self._note_gathering(agent_id, message)
            case ChildFailed():
                headline = message.failure.headline()
                self._note_phase(agent_id, "failed", message.generation, problem=headline)
                self._handle(states.ChildBroke(agent_id, self._dated(message)))
            case Traced() | ClockTold():
                self._note_clock(agent_id, message)
            case FeedProgress() | Spooled() | NodeActive() | NodeLoad():
                self._note_progress(agent_id, message)
            case CheckpointPart() | CheckpointDone():
                self._note_checkpoint(agent_id, message)
            case Gather():
                self._note_gathering(agent_id, message)
            case TrainsAlone():
                self._note_lone(agent_id, message)
            case BoardStarted():
                self._note_tensorboard(message)
            case LastLines(generation, lines) if node_id is not None:
                with self.changed:
                    self._last.keep(node_id, Attempt(generation, lines))
            case LogLines() if node_id is not None:
                of = self.spec.cluster_id, self.wall_s(), self._name(node_id)
                self.publish(events.Logged(*of, message))
            case LogTail(number, generation, lines):
                self._requests.answer(number, Attempt(generation, lines))
            case Stacks(number, text):
                self._requests.answer(number, text)
            case Profiled(number):
                self._requests.answer(number, message)

    def left(self, agent_id: str, reason: str) -> None:
        """An agent's connection has ended."""
        self._note_phase(agent_id, "left")
        self._clocks.pop(agent_id, None)
        self._handle(states.AgentLeft(agent_id, reason, self.wall_s()))

    def silent(self, hello: Hello) -> None:
        """An agent's host does not answer; the agent has `left`."""
        self._leave_host(hello.host, False)

    def cause(self) -> str | None:
        """Return what a feeder that no node answers has to know; see `control/cause.py`."""
        if isinstance(states.before_stop(self.view.state), states.Finished):
            return None
        failure = failure_of(self.view.state)
        return str(failure) if failure else ""

    def agent_of(self, node_id: int) -> str | None:
        """Return the agent of a node, if it has one."""
        roster = self._roster()
        agent = roster.agents.get(node_id) if roster else None
        return agent.agent_id if agent else None

    def cut(self, link: CutLink) -> None:
        """A feeder does not reach a node, and the driver reaches both."""
        self._handle(states.LinkCut(link.generation, link.node_id, link.host, self.wall_s()))

    # On the loop.

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._server.stop())
        finally:
            self._loop.close()

    def _dated(self, message: ChildFailed) -> ChildFailed:
        """Date a failure by the driver's clock, whatever its node's says."""
        if message.age_s is None:
            return message
        failure = replace(message.failure, time_s=self.wall_s() - message.age_s)
        return ChildFailed(message.generation, failure, message.age_s)

    def _handle(self, event: states.Event) -> None:
        try:
            state, actions = step(self.view.state, event, time.monotonic())
        except IllegalTransitionError:
            _log.exception("Ignored an event that has no place here")
            return
        if type(state) is not type(self.view.state):
            before, after = type(self.view.state).__name__, type(state).__name__
            _log.info("Cluster %s: %s, now %s", self.spec.cluster_id, before, after)
        with self.changed:
            if generation_of(state) not in (None, generation_of(self.view.state)):
                self.view.feeds.clear()  # a node that another agent takes begins at zero
            self.view.state = state
            self.changed.notify_all()
        self._publish_state()
        for action in actions:
            self._perform(action)
        self._arm_timer(state.deadline_s)

    def _publish_state(self) -> None:
        now_s, state = self.wall_s(), self.view.state
        self.publish(events.Stepped(self.spec.cluster_id, now_s))
        for event in self._seen.news(state, now_s):
            self.publish(event)
            if isinstance(event, events.Changed) and event.is_over:
                self._publish_sample()

    def _publish_sample(self) -> None:
        if self._stream.wants(events.Sampled):
            self.publish(sampled(self.spec, self.wall_s(), self.view))

    def _sample(self) -> None:
        """Sample from time to time, as long as anything can change."""
        if not is_empty(self.view.state):
            self._publish_sample()
            self.later(period_s(len(self.spec.nodes)), self._sample)

    def _perform(self, action: states.Action) -> None:
        match action:
            case states.Send(agent_id, message):
                self._server.send(agent_id, message)
            case states.Report(text):
                _log.info("Cluster %s: %s", self.spec.cluster_id, text)
            case states.Warn(text):
                _log.warning("Cluster %s: %s", self.spec.cluster_id, text)
            case states.Relaunch(nodes):
                if self._relaunch:
                    self._relaunch(nodes)
            case states.Release():
                self._release()
            case states.ForgetTask(node):
                self._forget_task(node)
            case states.LeaveHost(host):
                self._leave_host(host, True)

    def _arm_timer(self, deadline_s: float) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if not math.isinf(deadline_s):
            wait_s = max(0.0, deadline_s - time.monotonic())
            self._timer = self._loop.call_later(wait_s, self._handle, states.DeadlinePassed())

    def _roster(self) -> Roster | None:
        return getattr(self.view.state, "roster", None)

    def _world(self) -> World | None:
        return getattr(self.view.state, "world", None)

    def _node_of(self, agent_id: str) -> int | None:
        """Return the node that an agent is; `None` for a standby, and after the end."""
        roster = self._roster()
        return roster.node_of(agent_id) if roster else None

    def _broadcast(self, message: ToAgent, node_ids: set[int], generation: int | None) -> None:
        if generation not in (None, generation_of(self.view.state)):
            return
        if message == FeedEnd(()):
            with self.changed:
                self.view.have_feeds_ended = True
        roster = self._roster()
        for node_id, agent in roster.agents.items() if roster else ():
            if node_id in node_ids:
                self._server.send(agent.hello.agent_id, message)

    def _note_phase(
        self, agent_id: str, phase: str, generation: int = -1, host: str = "", problem: str = ""
    ) -> None:
        node_id = self._node_of(agent_id) if self._stream.wants(events.NodeMoved) else None
        if node_id is not None:
            about = node_id, phase, generation, host, problem
            self.publish(events.NodeMoved(self.spec.cluster_id, self.wall_s(), *about))

    def _ask_clock(self, agent_id: str) -> None:
        self._server.send(agent_id, AskClock(round(self.wall_s() * 1e6)))

    def _note_clock(self, agent_id: str, message: Traced | ClockTold) -> None:
        """Hand on spans, and what is needed to date them; a clock is asked for again then."""
        if agent_id not in self._clocks:
            return
        node_id, answers = self._clocks[agent_id]
        of = self.spec.cluster_id, self.wall_s(), agent_id, node_id
        if isinstance(message, Traced):
            self.publish(events.Spanned(*of, message))
        else:
            self.publish(events.ClockRead(*of, message.sent_us, message.local_us))
            self._clocks[agent_id] = node_id, answers + 1
        if isinstance(message, Traced) or answers + 1 < _FIRST_CLOCKS:
            self._ask_clock(agent_id)

    def _note_progress(
        self, agent_id: str, message: FeedProgress | Spooled | NodeActive | NodeLoad
    ) -> None:
        node_id = self._node_of(agent_id)
        if node_id is None:
            return
        with self.changed:
            if isinstance(message, NodeLoad):
                self.view.load[node_id] = message
                return
            if isinstance(message, NodeActive):
                before = self.view.activity.get(node_id)
                self.view.activity[node_id] = message
                self.view.waits.note(node_id, message, time.monotonic())
                self._progress.request()
                self._publish_report(node_id, message, before)
                return
            if isinstance(message, Spooled):
                self.view.spooled.append((node_id, message))
                self.view.progress += 1
            for now in message.counts if isinstance(message, FeedProgress) else ():
                if beyond := gone_beyond(self._name(node_id), now, self.view.feeds):
                    _log.warning("Cluster %s: %s", self.spec.cluster_id, beyond)
                if self.view.feeds.get((node_id, now.feed)) != now:
                    self.view.feeds[node_id, now.feed] = now
                    self.view.progress += 1
        self._progress.request()
        self.publish(events.Stepped(self.spec.cluster_id, self.wall_s()))

    def _publish_report(self, node_id: int, now: NodeActive, before: NodeActive | None) -> None:
        """Hand on what a node has done, if it is a report and a new one."""
        known = before and (before.generation, before.step, before.metrics)
        if now.step < 0 or known == (now.generation, now.step, now.metrics):
            return
        world = self._world()
        rank = world.member(node_id).rank if world and world.has(node_id) else -1
        about = self._name(node_id), rank, now.step, now.numbers
        self.publish(events.Report(self.spec.cluster_id, self.wall_s(), *about))

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _note_tensorboard(self, message: BoardStarted) -> None:
        with self.changed:
            self.view.tensorboard = message
            self.changed.notify_all()

    def _note_checkpoint(self, agent_id: str, message: CheckpointPart | CheckpointDone) -> None:
        state, node_id = self.view.state, self._node_of(agent_id)
        if node_id is None or not isinstance(state, (states.Running, states.Failing)):
            return  # another round begins, and it has been decided where
        roster, world = state.roster, state.world
        if isinstance(message, CheckpointPart):
            word = self.checkpoints.part(world, node_id, message, self.wall_s())
            if word is not None and word[0] in roster.agents:
                self._server.send(roster.agents[word[0]].hello.agent_id, word[1])
        elif ref := self.checkpoints.done(world.generation, message):
            _log.info("Cluster %s: checkpoint %s is complete", self.spec.cluster_id, ref.url)
            for feed, epoch in self.checkpoints.coverage.covered_to(world.generation).items():
                if epoch:
                    self._broadcast(FeedCovered(feed, epoch), set(roster.agents), None)
            self._handle(states.CheckpointMade(ref))

    def _note_gathering(self, agent_id: str, message: Gather | ChildReturned) -> None:
        world, node_id = self._world(), self._node_of(agent_id)
        if world is None or node_id is None:
            return
        if isinstance(message, Gather):
            answers = self._gatherings.give(world, node_id, message)
        else:
            answers = self._gatherings.leave(world, node_id, message.generation)
        for answer in answers:
            self._broadcast(answer, {member.node.node_id for member in world.trainers}, None)

    def _note_lone(self, agent_id: str, message: TrainsAlone) -> None:
        world, node_id = self._world(), self._node_of(agent_id)
        if world is None or node_id is None:
            return
        count = self._lone_trainers.note(world, node_id, message)
        if message.question >= 0:
            self._server.send(agent_id, LoneNodes(message.generation, message.question, count))
        elif warning := self._lone_trainers.warning(world, message, self.spec.framework):
            _log.warning("Cluster %s: %s", self.spec.cluster_id, warning)

    def _send_request(self, request: PendingRequest) -> None:
        roster = self._roster()
        agents = roster.agents if roster else {}
        self._requests.ask(request, {node_id: a.agent_id for node_id, a in agents.items()})

    def _name(self, node_id: int) -> str:
        nodes = self.spec.nodes
        return nodes[node_id].name if 0 <= node_id < len(nodes) else f"node {node_id}"
