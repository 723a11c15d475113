"""When a training stands still, and who is behind: decided from what nodes have told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparkdl.control.messages import ChildReturned, NodeActive
from sparkdl.control.rows import EpochCount, FeedCount, ReadCounts
from sparkdl.core.options import Feeding, Roles
from sparkdl.core.settings import Settings
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.core.world import Address, build_world
from sparkdl.driver import health
from sparkdl.driver.lifecycle.state import AgentRegistry, Running

TIMEOUT_S = 60.0
ONE, TWO = health.Progress(0, "worker:0", 0, step=7), health.Progress(1, "worker:1", 1, step=7)


def hang_of(*rounds: tuple[health.Progress, ...], every_s: float = 10.0) -> health.Hang | None:
    """Look once for each of `rounds`, then until a hang is found or long after the timeout."""
    watch, hang = health.Watch(), None
    looks = [*rounds, *[rounds[-1]] * 20]
    for number, nodes in enumerate(looks):
        watch, found = health.look(watch, 0, nodes, number * every_s, TIMEOUT_S)
        assert not (found and hang), "told of once only"
        hang = hang or found
    return hang


def test_node_that_alone_has_not_returned_is_named() -> None:
    hang = hang_of((ONE, TWO), (TWO,))
    assert hang
    assert hang.describe().endswith("for 60 s: worker:1 (rank 1) at step 7")


def test_who_is_behind_is_told_from_who_is_ahead() -> None:
    behind = replace(TWO, step=-1)
    hang = hang_of((ONE, behind))
    assert hang
    assert hang.behind == (behind,)
    assert "60 s: worker:1 (rank 1) at no step yet, worker:0 (rank 0) at step 7" in hang.describe()
    assert hang.message(behind).endswith("at no step yet, while worker:0 (rank 0) is at step 7")


@pytest.mark.parametrize(
    "news",
    [
        (replace(ONE, step=8), TWO),
        (replace(ONE, batches=1), TWO),
        (replace(ONE, rows=1), TWO),
        (TWO,),  # the other has returned
    ],
)
def test_progress_of_one_node_is_progress_of_all(news: tuple[health.Progress, ...]) -> None:
    watch, _ = health.look(health.Watch(), 0, (ONE, TWO), 0.0, TIMEOUT_S)
    for now_s in (20.0, 40.0):
        watch, _ = health.look(watch, 0, (ONE, TWO), now_s, TIMEOUT_S)
    watch, hang = health.look(watch, 0, news, 59.0, TIMEOUT_S)
    assert (watch.since_s, hang) == (59.0, None)


def test_lines_count_for_those_alone_who_never_told_a_step() -> None:
    silent = health.Progress(0, "worker:0", 0)
    prints = [(replace(silent, log_nbytes=n),) for n in range(30)]
    watch = health.Watch()
    for number, nodes in enumerate(prints):
        watch, hang = health.look(watch, 0, nodes, number * 10.0, TIMEOUT_S)
        assert hang is None
    assert hang_of(prints[0])
    chatty = [(ONE, replace(TWO, log_nbytes=n)) for n in range(7)]
    assert hang_of(*chatty), "who has told steps is not kept alive by what it prints"
    mixed = [(ONE, replace(silent, node_id=1, log_nbytes=n)) for n in range(7)]
    assert hang_of(*mixed), "nor by a node that tells none"


def test_nodes_that_have_read_all_wait_for_the_next_feed_and_do_not_hang() -> None:
    idle = replace(ONE, is_idle=True), replace(TWO, is_idle=True)
    assert hang_of(idle) is None
    assert hang_of((idle[0], TWO)), "one of them has rows"


@pytest.mark.parametrize("asleep_s", [1000.0, TIMEOUT_S / 2 + 1.0])
def test_driver_that_stood_still_itself_blames_nobody(asleep_s: float) -> None:
    watch, _ = health.look(health.Watch(), 0, (ONE,), 0.0, TIMEOUT_S)
    for later_s in (0.0, 20.0, 40.0):
        watch, hang = health.look(watch, 0, (ONE,), asleep_s + later_s, TIMEOUT_S)
        assert hang is None
    assert health.look(watch, 0, (ONE,), asleep_s + 60.0, TIMEOUT_S)[1]


def test_nodes_that_come_up_get_the_time_to_do_so() -> None:
    starting = replace(ONE, step=-1, has_entered=False)
    watch, _ = health.look(health.Watch(), 0, (starting, TWO), 0.0, TIMEOUT_S, 300.0)
    for now_s in range(20, 300, 20):
        watch, hang = health.look(watch, 0, (starting, TWO), now_s, TIMEOUT_S, 300.0)
        assert hang is None
    assert health.look(watch, 0, (starting, TWO), 300.0, TIMEOUT_S, 300.0)[1]


NODES = plan_nodes(4, Roles(ps=1, chief="chief", evaluator=True))
WORLD = build_world(3, {node: Address("h", 1, "") for node in NODES})
SPEC = ClusterSpec("c", NODES, framework="plain")
RUNNING = Running(AgentRegistry(SPEC), WORLD, frozenset({1, 3}))
CHIEF, WORKER = 1, 3


def test_only_nodes_that_finish_the_job_are_watched_until_they_return() -> None:
    found = health.progress_of(RUNNING, {}, {}, False)
    assert [node.node for node in found] == ["chief:0", "worker:0"]
    running = replace(RUNNING, returned={CHIEF: ChildReturned(3, b"")})
    assert [node.node for node in health.progress_of(running, {}, {}, False)] == ["worker:0"]


def test_what_is_told_of_another_world_does_not_count() -> None:
    activity = {CHIEF: NodeActive(2, 50), WORKER: NodeActive(3, 4, batches=2, log_nbytes=9)}
    feeds = {
        (WORKER, "a"): FeedCount("a", 8, ReadCounts(8, steps=1)),
        (WORKER, "b"): FeedCount("b", 4, ReadCounts(2)),
    }
    chief, worker = health.progress_of(RUNNING, feeds, activity, False)
    assert (chief.step, chief.has_reported) == (-1, False)
    assert (worker.step, worker.batches, worker.rows, worker.log_nbytes) == (4, 3, 10, 9)


@pytest.mark.parametrize(
    ("count", "is_idle"),
    [
        (FeedCount("a"), True),
        (FeedCount("a", 2, ReadCounts(1), epoch_rows=2), False),
        # One waits for the next epoch.
        (FeedCount("a", 3, ReadCounts(2, epochs=1), cut=EpochCount(0)), True),
        (FeedCount("a", 2, ReadCounts(1, dropped=1)), True),
        (FeedCount("a", 2, ReadCounts(2), cut=EpochCount(0)), False),  # its end is to be seen
        (FeedCount("a", 2, ReadCounts(2, epochs=1), cut=EpochCount(0)), True),
        (FeedCount("a", 2, ReadCounts(4, epochs=2), cut=EpochCount(2)), False),
        (FeedCount("a", rows_received=2, epoch_rows=2, closed_to=0), True),
        (FeedCount("a", rows_received=2, closed=True), True),
    ],
)
def test_node_is_idle_once_it_has_read_all(count: FeedCount, is_idle: bool) -> None:
    feeds = {(CHIEF, "a"): count, (WORKER, "a"): count}
    assert [n.is_idle for n in health.progress_of(RUNNING, feeds, {}, False)] == [is_idle] * 2
    assert not any(n.is_idle for n in health.progress_of(RUNNING, feeds, {}, True)), (
        "no feed will come"
    )
    own = replace(SPEC, settings=Settings(feeding=Feeding(fed=False)))
    running = replace(RUNNING, registry=AgentRegistry(own))
    assert not any(n.is_idle for n in health.progress_of(running, feeds, {}, False))
