"""The driver's thread for one cluster: agents' messages become events, decisions become messages.

It decides in `driver/lifecycle/transitions.py`; this file performs. All of it runs on one event
loop in one thread; the handle asks from other threads through `submit`, `broadcast` and `wait_for`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, TypeVar

from sparkdl.control import messages as msg
from sparkdl.control.rows import FeedCount
from sparkdl.control.server import CoordinatorServer, ServerAddress
from sparkdl.control.tls import Tls
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import IllegalTransitionError
from sparkdl.core.spec import ClusterSpec, NodeSpec
from sparkdl.core.throttle import Throttle
from sparkdl.core.world import CheckpointRef, World
from sparkdl.driver import events
from sparkdl.driver.collect import Checkpoints, Gatherings
from sparkdl.driver.executors.executor import Executor
from sparkdl.driver.feeds.coverage import CoverageStore
from sparkdl.driver.feeds.report import reads_extra_epochs
from sparkdl.driver.lifecycle import state as states
from sparkdl.driver.lifecycle.state import agents_of, failure_of, generation_of
from sparkdl.driver.lifecycle.transitions import begin, step
from sparkdl.driver.stream import ClusterEvents
from sparkdl.driver.threads import Changed
from sparkdl.driver.view import ClusterView
from sparkdl.node.task import Problem

_log = logging.getLogger(__name__)
T = TypeVar("T")

_THREAD_END_S = 10.0
_RELEASE_S = 10.0
_PROGRESS_S = 0.05
"""Threads that wait for progress wake at most this often: waking one costs more than a report.
"""


class Controller:
    """One cluster's coordinator. `start`, use, `close`.

    Attributes:
        changed: held while the `view` changes.
        events: the cluster's events, for subscribers.
        server: the server that agents and feeders connect to.
        advertised_address: its address for executors; `None` before it listens.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        token: str,
        executor: Executor,
        checkpoint: CheckpointRef | None = None,
        tls: Tls | None = None,
    ) -> None:
        self.spec = spec
        self.changed = Changed()
        self.view = ClusterView(begin(spec, time.monotonic(), checkpoint))
        # Otherwise no call is ever fed again, and its data need not stay.
        keeps = spec.settings.can_restart or spec.checkpoint_dir is not None
        self.checkpoints = Checkpoints(spec.cluster_id, CoverageStore(keeps))
        self._gatherings = Gatherings()
        self._executor = executor
        self._loop = asyncio.new_event_loop()
        limits = (spec.settings.lease_s, spec.settings.recovery.host_timeout_s)
        self.server = CoordinatorServer(token, self, *limits, tls=tls)
        self.events = ClusterEvents(spec, self.view, self.changed, self._loop)
        self._numbers = count()
        self._answers: dict[int, dict[str, str]] = {}
        """To questions, by their numbers and the agents."""
        self._last_lines: dict[int, str] = {}
        """Of the child that ended last, by node id."""
        self.advertised_address: ServerAddress | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._progress = Throttle(self._loop, self._notify, _PROGRESS_S)
        self._thread = threading.Thread(
            target=self._run, name=f"sparkdl-controller-{spec.cluster_id}", daemon=True
        )

    # From other threads.

    def start(self, host: str, ports: tuple[int, ...]) -> ServerAddress:
        """Start the thread and listen; return where the executors reach it."""
        self._thread.start()
        try:
            self.advertised_address = address = self._call(self.server.start(host, ports))
            self.soon(self._arm_timer, self.view.state.deadline_s)
            return address
        except BaseException:
            self.close()
            raise

    def submit(self, event: states.Event) -> bool:
        """Handle an event on the controller's thread; return false once it is closed."""
        return self.soon(self._handle, event)

    def broadcast(
        self, message: msg.ToAgent, node_ids: set[int], generation: int | None = None
    ) -> None:
        """Send a message to the agents of some nodes, as long as the world is of `generation`."""
        self.soon(self._broadcast, message, node_ids, generation)

    def wait_for(self, is_true: Callable[[ClusterView], bool], deadline: Deadline) -> bool:
        """Wait until `is_true` of the view; return whether it is."""
        return self.changed.wait_for(lambda: is_true(self.view), deadline)

    def gather(self, deadline: Deadline) -> bool:
        return self.wait_for(lambda view: not isinstance(view.state, states.Gathering), deadline)

    def look(self, at: Callable[[ClusterView], T]) -> T:
        with self.changed:
            return at(self.view)

    def fetch_log(self, node_id: int, lines: int, deadline: Deadline) -> tuple[str, ...]:
        """Return the last lines of a node's child; if its agent is gone, those of its end."""
        answers = self._ask([node_id], partial(msg.Fetch, lines=lines), deadline)
        with self.changed:
            text = answers.get(node_id, self._last_lines.get(node_id, ""))
        return tuple(text.split("\n")[-lines:]) if text and lines > 0 else ()

    def fetch_stacks(self, deadline: Deadline) -> dict[str, str]:
        """Return by node name the stacks of its child, or why they are unknown."""
        answers = self._ask([node.node_id for node in self.spec.nodes], msg.Fetch, deadline)
        silent = "its agent did not answer: it is lost or stopped, or cannot be reached"
        if self.look(lambda view: states.is_empty(view.state)):
            silent = "the cluster has ended"
        return {node.name: answers.get(node.node_id, silent) for node in self.spec.nodes}

    def _ask(
        self, node_ids: Iterable[int], question: Callable[[int], msg.ToAgent], deadline: Deadline
    ) -> dict[int, str]:
        """Ask the agents of some nodes; return the answers in time, by node id."""
        number, answers = next(self._numbers), dict[str, str]()
        with self.changed:
            agents = agents_of(self.view.state)
            asked = {agents[n].agent_id: n for n in node_ids if n in agents}
            self._answers[number] = answers
        if self.soon(self._send_all, list(asked), question(number)):
            self.changed.wait_for(lambda: len(answers) == len(asked), deadline)
        with self.changed:
            del self._answers[number]
            return {asked[agent_id]: answer for agent_id, answer in answers.items()}

    def _send_all(self, agent_ids: Iterable[str], message: msg.ToAgent) -> None:
        for agent_id in agent_ids:
            self.server.send(agent_id, message)

    def is_lost(self, node: NodeSpec, pid: int) -> bool:
        """Whether the agent of a node, by its process id, was connected and is not any more."""
        with self.changed:
            agent = agents_of(self.view.state).get(node.node_id)
            is_connected = agent is not None and agent.hello.pid == pid
            return (node.node_id, pid) in self.view.joined and not is_connected

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def soon(self, function: Callable[..., object], *arguments: Any) -> bool:
        """Call `function` on the loop; return false once the controller is closed."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            return False
        return True

    def later(
        self, wait_s: float, function: Callable[..., object], *arguments: Any
    ) -> asyncio.TimerHandle:
        """Call `function` on the loop in `wait_s` seconds; must be called there."""
        return self._loop.call_later(wait_s, function, *arguments)

    def close(self) -> None:
        if not self._thread.is_alive():
            self.events.end()
            self._loop.close()
            return
        try:
            self._call(self.server.stop())
        finally:
            # Also if the server does not end in time: the thread would stay.
            self.events.end()
            self.soon(self._loop.stop)
            self._thread.join(_THREAD_END_S)

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_THREAD_END_S)

    # From the server, on the loop.

    def joined(self, hello: msg.Hello) -> None:
        _log.debug("%s joined from %s", self._name(hello.node_id), hello.host)
        with self.changed:
            self.view.joined.add((hello.node_id, hello.pid))
        self._handle(states.AgentJoined(hello))

    def start_failed(self, message: msg.StartFailed) -> None:
        problem = Problem(message.kind, message.text).at_driver()
        self._handle(states.LaunchFailed(problem))

    def received(self, agent_id: str, message: msg.FromAgent) -> None:  # noqa: C901, PLR0912 (one case a message)
        node_id = self._node_of(agent_id)
        match message:
            case msg.ChildReady():
                self._handle(states.AgentReady(agent_id, message))
            case msg.Detached():
                self._handle(states.AgentDetached(agent_id))
            case msg.ChildRunning():
                if node_id is not None:
                    with self.changed:
                        self.view.pids[node_id] = message.pid
                self._handle(states.ChildEntered(agent_id, message))
            case msg.ChildReturned():
                self._handle(states.ResultReported(agent_id, message))
                self._note_gathering(agent_id, message)
            case msg.ChildFailed():
                self._handle(states.FailureReported(agent_id, self._dated(message)))
            case msg.FeedProgress() | msg.Spooled() | msg.NodeActive() | msg.NodeLoad():
                self._note_progress(agent_id, message)
            case msg.CheckpointPart() | msg.CheckpointDone():
                self._note_checkpoint(agent_id, message)
            case msg.Gather():
                self._note_gathering(agent_id, message)
            case msg.BoardStarted():
                with self.changed:
                    self.view.tensorboard = message
                    self.changed.notify_all()
            case msg.LogLines() if node_id is not None:
                self.events.publish(events.Logged, self._name(node_id), message)
            case msg.Fetched(text, number):
                with self.changed:
                    if number in self._answers:  # otherwise it comes too late
                        self._answers[number][agent_id] = text
                        self.changed.notify_all()
                    elif number < 0 and node_id is not None:
                        self._last_lines[node_id] = text

    def left(self, agent_id: str, reason: str) -> None:
        self._handle(states.AgentLeft(agent_id, reason, self.events.now_s()))

    def silent(self, hello: msg.Hello) -> None:
        self._executor.leave_host(hello.host)

    def cause(self) -> str | None:
        """Return why no node answers a feeder: the feeder reports it, see `control/auth.py`."""
        if isinstance(states.before_stop(self.view.state), states.Finished):
            return None
        failure = failure_of(self.view.state)
        return str(failure) if failure else ""

    # On the loop.

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self.server.stop())
        finally:
            self._loop.close()

    def _dated(self, message: msg.ChildFailed) -> msg.ChildFailed:
        """Date a failure by the driver's clock, whatever its node's says."""
        if message.age_s is None:
            return message
        failure = replace(message.failure, time_s=self.events.now_s() - message.age_s)
        return msg.ChildFailed(message.generation, failure, message.age_s)

    def _handle(self, event: states.Event) -> None:
        try:
            state, actions = step(self.view.state, event, time.monotonic())
        except IllegalTransitionError:
            # The cluster goes on: the state is unchanged, and a bug here must not end a training.
            _log.exception("Ignored an event without a transition: a bug in sparkdl")
            return
        if type(state) is not type(self.view.state):
            before, after = type(self.view.state).__name__, type(state).__name__
            _log.info("Cluster %s: state %s -> %s", self.spec.cluster_id, before, after)
        # One lock for both changes: readers must not see the new generation with old counts.
        with self.changed:
            if generation_of(state) not in (None, generation_of(self.view.state)):
                self.view.feeds.clear()  # a node that another agent takes begins at zero
            self.view.state = state
            self.changed.notify_all()
        self.events.publish_state()
        for action in actions:
            self._perform(action)
        self._arm_timer(state.deadline_s)  # a state has one deadline

    def _perform(self, action: states.Action) -> None:
        match action:
            case states.Send(agent_id, message):
                self.server.send(agent_id, message)
            case states.Report(text):
                _log.info("Cluster %s: %s", self.spec.cluster_id, text)
            case states.Warn(text):
                _log.warning("Cluster %s: %s", self.spec.cluster_id, text)
            case states.Relaunch(nodes):
                self._executor.relaunch(nodes)
            case states.Release():
                # In a thread: closing waits for agents, and their messages come on this loop.
                name = f"sparkdl-release-{self.spec.cluster_id}"
                close = partial(self._executor.close, Deadline.after(_RELEASE_S))
                threading.Thread(target=close, name=name, daemon=True).start()
            case states.ForgetTask(node):
                self._executor.forget_task(node)

    def _arm_timer(self, deadline_s: float) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if not math.isinf(deadline_s):
            wait_s = max(0.0, deadline_s - time.monotonic())
            self._timer = self._loop.call_later(wait_s, self._handle, states.DeadlinePassed())

    def _world(self) -> World | None:
        return getattr(self.view.state, "world", None)

    def _node_of(self, agent_id: str) -> int | None:
        """Return the node that an agent is; `None` for a standby, and after the end."""
        registry = getattr(self.view.state, "registry", None)
        return registry.node_of(agent_id) if registry else None

    def _broadcast(self, message: msg.ToAgent, node_ids: set[int], generation: int | None) -> None:
        if generation not in (None, generation_of(self.view.state)):
            return
        if message == msg.FeedEnd(()):  # of all feeds: the hang watch expects no more rows then
            with self.changed:
                self.view.have_feeds_ended = True
        for node_id, agent in agents_of(self.view.state).items():
            if node_id in node_ids:
                self.server.send(agent.hello.agent_id, message)

    def _note_progress(
        self, agent_id: str, message: msg.FeedProgress | msg.Spooled | msg.NodeActive | msg.NodeLoad
    ) -> None:
        node_id = self._node_of(agent_id)
        if node_id is None:
            return
        with self.changed:
            # Load is no progress, so no waiting thread is woken for it.
            if isinstance(message, msg.NodeLoad):
                self.view.load[node_id] = message
                return
            if isinstance(message, msg.NodeActive):
                before = self.view.activity.get(node_id)
                self.view.activity[node_id] = message
                self._progress.request()
                self._publish_report(node_id, message, before)
                return
            if generation_of(self.view.state) not in (None, message.generation):
                return  # from an ended child: the next one's counts begin at 0
            if isinstance(message, msg.Spooled):
                self.view.spooled.append((node_id, message))
                self.view.progress += bool(message.ranges)
            else:
                self._note_counts(node_id, message.counts)
        self._progress.request()
        self.events.publish(events.Stepped)

    def _note_counts(self, node_id: int, counts: Iterable[FeedCount]) -> None:
        """Note what a node has received and consumed, under the condition."""
        for now in counts:
            if extra := reads_extra_epochs(self._name(node_id), now, self.view.feeds):
                _log.warning("Cluster %s: %s", self.spec.cluster_id, extra)
            if self.view.feeds.get((node_id, now.feed)) != now:
                self.view.feeds[node_id, now.feed] = now
                self.view.progress += 1

    def _publish_report(
        self, node_id: int, now: msg.NodeActive, before: msg.NodeActive | None
    ) -> None:
        known = before and (before.generation, before.step, before.metrics)
        if now.step < 0 or known == (now.generation, now.step, now.metrics):
            return
        world = self._world()
        rank = world.member(node_id).rank if world and world.has(node_id) else -1
        self.events.publish(events.Report, self._name(node_id), rank, now.step, now.numbers)

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _note_checkpoint(
        self, agent_id: str, message: msg.CheckpointPart | msg.CheckpointDone
    ) -> None:
        state, node_id = self.view.state, self._node_of(agent_id)
        if node_id is None or not isinstance(state, (states.Running, states.Failing)):
            return  # another round begins, at a checkpoint that has been decided
        registry, world = state.registry, state.world
        if isinstance(message, msg.CheckpointPart):
            reply = self.checkpoints.part(world, node_id, message, self.events.now_s())
            if reply is not None and reply[0] in registry.agents:
                self.server.send(registry.agents[reply[0]].hello.agent_id, reply[1])
        elif ref := self.checkpoints.done(world.generation, message):
            _log.info("Cluster %s: checkpoint %s is complete", self.spec.cluster_id, ref.url)
            for feed, epoch in self.checkpoints.coverage.covered_to(world.generation).items():
                if epoch:
                    self._broadcast(msg.FeedCovered(feed, epoch), set(registry.agents), None)
            self._handle(states.CheckpointCompleted(ref))

    def _note_gathering(self, agent_id: str, message: msg.Gather | msg.ChildReturned) -> None:
        world, node_id = self._world(), self._node_of(agent_id)
        if world is None or node_id is None:
            return
        if isinstance(message, msg.Gather):
            answers = self._gatherings.give(world, node_id, message)
        else:
            # A node that has returned gives no further value, so the others must not wait for one.
            answers = self._gatherings.leave(world, node_id, message.generation)
        for answer in answers:
            self._broadcast(answer, {member.node.node_id for member in world.trainers}, None)

    def _name(self, node_id: int) -> str:
        nodes = self.spec.nodes
        return nodes[node_id].name if 0 <= node_id < len(nodes) else f"node {node_id}"
