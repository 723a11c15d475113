"""The controller, with real connections: what agents say becomes state, decisions reach them."""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from unittest.mock import Mock

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from sparkdl.control import messages as msg
from sparkdl.control.auth import bearer
from sparkdl.control.rows import FeedCount, ReadCounts
from sparkdl.core import errors
from sparkdl.core.deadline import Deadline
from sparkdl.core.failure import Failure, FailureKind
from sparkdl.core.settings import Settings
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.core.world import Address, World, build_world
from sparkdl.driver import stream
from sparkdl.driver.controller import Controller
from sparkdl.driver.events import Changed as StateChanged, Event, Logged, Report, Sampled
from sparkdl.driver.executors.executor import Executor
from sparkdl.driver.launch import hand_on
from sparkdl.driver.lifecycle import state as states
from sparkdl.driver.options import LogLine
from sparkdl.driver.view import ClusterView

HOST, TOKEN = "127.0.0.1", "the-token"
AT_ONCE = Settings(settle_s=0.0)
"""One failure is enough: no others are waited for."""
SOON_S = 20.0
"""Deadline of what takes a moment, so that a hang fails; no measure of speed."""


@dataclass
class FakeAgent:
    """An agent of one node, as far as the coordinator can tell."""

    connection: ClientConnection
    node_id: int

    def say(self, message: msg.FromAgent) -> None:
        self.connection.send(msg.encode(message))

    def hears(self) -> msg.ToAgent:
        return msg.decode_to_agent(self.connection.recv(timeout=SOON_S))

    def hears_the_end(self) -> bool:
        try:
            heard = self.connection.recv(timeout=SOON_S)
        except ConnectionClosed:
            return True
        pytest.fail(f"heard {heard!r}")

    def leave(self) -> None:
        self.connection.close()


@dataclass
class Play:
    """A controller and the agents that a test has it meet; ends them all."""

    controller: Controller
    url: str = ""
    connections: ExitStack = field(default_factory=ExitStack)

    def agent(self, node_id: int, agent_id: str = "", is_ready: bool = True) -> FakeAgent:
        """Have an agent join; its node has host `host-<id>` and port `9000 + <id>`."""
        headers = {"Authorization": bearer(TOKEN)}
        connecting = connect(self.url, additional_headers=headers, proxy=None)
        agent = FakeAgent(self.connections.enter_context(connecting), node_id)
        name = agent_id or f"agent-{node_id}"
        agent.say(msg.Hello(node_id, "", name, f"host-{node_id}", 40 + node_id, "", "process"))
        if is_ready:
            agent.say(msg.ChildReady(0, 9000 + node_id))
        else:
            self.until(lambda view: name in ids_of(view))
        return agent

    def world(self, num_nodes: int = 2) -> list[FakeAgent]:
        agents = [self.agent(node_id) for node_id in range(num_nodes)]
        for agent in agents:
            assert agent.hears() == msg.Begin(world_of(num_nodes))
        return agents

    def until(self, is_true: Callable[[ClusterView], bool]) -> None:
        if not self.controller.wait_for(is_true, Deadline.after(SOON_S)):
            pytest.fail(f"still {self.controller.look(lambda view: view)}")

    def until_is(self, *kinds: type) -> states.State:
        self.until(lambda view: isinstance(view.state, kinds))
        return self.controller.look(lambda view: view.state)


def ids_of(view: ClusterView) -> set[str]:
    registry = getattr(view.state, "registry", None)
    agents = (*registry.agents.values(), *registry.standbys) if registry else ()
    return {agent.hello.agent_id for agent in agents}


def world_of(num_nodes: int, generation: int = 0, port: int = 9000) -> World:
    return build_world(
        generation,
        {n: Address(f"host-{n.node_id}", port + n.node_id, "") for n in plan_nodes(num_nodes)},
    )


@contextmanager
def playing(
    num_nodes: int = 2,
    settings: Settings = AT_ONCE,
    on_log: Callable[[LogLine], None] | None = None,
) -> Iterator[Play]:
    spec = ClusterSpec("test", plan_nodes(num_nodes), settings=settings or Settings())
    executor = Mock(spec_set=Executor)
    play = Play(Controller(spec, TOKEN, executor))
    try:
        if on_log is not None:
            play.controller.events.subscribe(partial(hand_on, on_log), Logged)
        play.url = play.controller.start(HOST, (0,)).url
        yield play
    finally:
        play.controller.close()
        play.connections.close()


@pytest.fixture
def play() -> Iterator[Play]:
    with playing() as play:
        yield play


def child_failed(node_id: int, kind: FailureKind, time_s: float) -> msg.ChildFailed:
    node = plan_nodes(9)[node_id]
    return msg.ChildFailed(0, Failure(node.name, kind, "ValueError: no", time_s, node_id=node_id))


def test_agent_is_lost_when_it_has_been_there_and_is_no_more(play: Play) -> None:
    node = plan_nodes(2)[0]
    assert not play.controller.is_lost(node, 40), "it is coming up"
    agent = play.agent(0)
    play.until(lambda view: bool(ids_of(view)))
    assert not play.controller.is_lost(node, 40)
    agent.leave()
    play.until(lambda view: not ids_of(view))
    assert play.controller.is_lost(node, 40)
    assert not play.controller.is_lost(node, 41), "another process"


def test_event_out_of_place_is_only_logged(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    play.controller.submit(states.StopRequested(0.0, 0.0))
    before = play.until_is(states.Stopped)
    with caplog.at_level(logging.ERROR):
        play.controller.submit(states.DeadlinePassed())
        late = play.agent(0)
        assert late.hears() == msg.Stop(0.0)
    assert "DeadlinePassed in Stopped" in caplog.text
    assert play.controller.look(lambda view: view.state) == before


def test_a_broadcast_for_another_world_reaches_nobody(play: Play) -> None:
    agents = play.world()
    play.controller.broadcast(msg.FeedEnd(("old",)), {0, 1}, generation=1)
    play.controller.broadcast(msg.FeedEnd(("now",)), {0, 1}, generation=0)
    assert [agent.hears() for agent in agents] == [msg.FeedEnd(("now",))] * 2


def test_progress_counts_news_only(play: Play) -> None:
    agents = play.world()
    counts = FeedCount("x", 10, ReadCounts(4)), FeedCount("y", 1, ReadCounts(1), closed=True)
    agents[0].say(msg.FeedProgress(0, counts))
    agents[0].say(msg.FeedProgress(0, counts))
    agents[0].say(msg.ChildReturned(0, b""))
    agents[1].say(msg.FeedProgress(0, (FeedCount("x", 7, ReadCounts(7)),)))
    play.until(lambda view: (1, "x") in view.feeds and bool(getattr(view.state, "returned", ())))
    feeds, progress = play.controller.look(lambda view: (dict(view.feeds), view.progress))
    other = FeedCount("x", 7, ReadCounts(7))
    assert feeds == {(0, "x"): counts[0], (0, "y"): counts[1], (1, "x"): other}
    assert progress == 3


def test_counts_that_a_child_leaves_behind_are_not_the_next_ones() -> None:
    """They come while the next world gathers; its feeding began with them, and waited for ever."""
    with playing(settings=replace(AT_ONCE, max_restarts=1)) as play:
        agents = play.world()
        agents[0].say(child_failed(0, "exception", 1.0))
        play.until_is(states.Gathering)
        for generation, rows in ((0, 80), (1, 0)):
            agents[1].say(msg.FeedProgress(generation, (FeedCount("x", rows, ReadCounts(rows)),)))
            agents[1].say(msg.Spooled(generation, "x", 0, (), 0))
        play.until(lambda view: bool(view.feeds and view.spooled))
        feeds, spooled = play.controller.look(lambda view: (view.feeds, [*view.spooled]))
        assert feeds == {(1, "x"): FeedCount("x", 0, ReadCounts(0))}
        assert [(node_id, report.generation) for node_id, report in spooled] == [(1, 1)]


def test_the_log_of_a_node_that_is_not_there_or_does_not_answer_is_empty(play: Play) -> None:
    agents = play.world()
    assert play.controller.fetch_log(7, 5, Deadline.after(SOON_S)) == ()
    assert play.controller.fetch_log(0, 5, Deadline.after(0.05)) == ()
    asked = agents[0].hears()
    assert isinstance(asked, msg.Fetch)
    agents[0].say(msg.Fetched("too late", asked.request))
    agents[0].say(msg.ChildReturned(0, b""))
    play.until(lambda view: bool(getattr(view.state, "returned", ())))


def test_the_last_lines_of_a_child_outlive_its_agent_and_the_cluster(play: Play) -> None:
    agents = play.world()
    twin = play.agent(0, "twin", is_ready=False)
    twin.say(msg.Fetched("of nobody"))
    agents[0].say(msg.Fetched("of the first child"))
    agents[0].say(msg.Fetched("one\ntwo\nthree"))
    agents[0].say(msg.ChildReturned(0, b""))
    play.until(lambda view: bool(getattr(view.state, "returned", ())))
    play.controller.close()
    for lines, kept in ((2, ("two", "three")), (9, ("one", "two", "three")), (0, ())):
        assert play.controller.fetch_log(0, lines, Deadline.after(SOON_S)) == kept
    assert play.controller.fetch_log(1, 5, Deadline.after(SOON_S)) == ()


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("sparkdl-controller")]


def test_close_ends_connections_and_thread_and_may_be_repeated(play: Play) -> None:
    agents = play.world()
    assert threads() == ["sparkdl-controller-test"]
    play.controller.close()
    assert threads() == []
    assert all(agent.hears_the_end() for agent in agents)
    play.controller.close()


def test_a_controller_without_a_port_leaves_nothing() -> None:
    with closing(socket.create_server((HOST, 0))) as held:
        port = held.getsockname()[1]
        controller = Controller(ClusterSpec("test", plan_nodes(1)), TOKEN, Mock(spec_set=Executor))
        why = f"cannot listen on {HOST}, port {port}: .*SPARKDL_DRIVER_HOST.*_DRIVER_PORT"
        with pytest.raises(errors.ConfigError, match=why):
            controller.start(HOST, (port, port))
    assert threads() == []


def test_samples_come_while_there_is_anyone_to_sample_and_the_last_when_all_have_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "PERIOD_S", 0.01)
    sampled: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with playing() as play:
        agents = [play.agent(1), play.agent(0)]
        play.controller.events.subscribe(sampled.put, Sampled, StateChanged)
        for _ in range(4):
            sampled.get(timeout=SOON_S)
        play.controller.submit(states.StopRequested(0.0, SOON_S))
        for agent in agents:
            agent.leave()
        while not (
            isinstance(event := sampled.get(timeout=SOON_S), StateChanged) and event.is_over
        ):
            pass
        assert isinstance(sampled.get(timeout=SOON_S), Sampled)
        with pytest.raises(queue.Empty):
            sampled.get(timeout=0.1)


def test_report_is_handed_on_once_with_its_rank(play: Play) -> None:
    reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
    play.controller.events.subscribe(reports.put, Report)
    agent, _ = play.agent(1), play.agent(0)
    play.until_is(states.Running)
    for step in (3, 3, 4):
        agent.say(msg.NodeActive(0, step, {"loss": 0.5}))
    first, second = (reports.get(timeout=SOON_S) for _ in range(2))
    assert (first.node, first.rank, first.step, first.metrics) == ("worker:1", 1, 3, {"loss": 0.5})
    assert second.step == 4
