"""Who serves and who trains with parameter servers, and a worker's feed as its server reads it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

import sparkdl
from sparkdl.control.channel import Reopened, Terminated
from sparkdl.core.errors import ConfigError
from sparkdl.core.options import Feeding, Roles
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.core.world import Address, build_world
from sparkdl.feed.reader.batches import EpochBatches
from sparkdl.frameworks.tensorflow_server import (
    FLUSHED,
    NO_ROW,
    OVER,
    ROWS,
    Stream,
    Streams,
    Wanted,
)
from sparkdl.node.context import NodeContext
from sparkdl.node.link import AgentLink
from tests.doubles.feeds import FEED, Arrivals
from tests.doubles.frameworks import SERVES
from tests.doubles.gates import Gate
from tests.doubles.map_funs import hang
from tests.doubles.nodes import SOON_S, all_gone, launch, processes


def numbers(stream: Stream) -> list[int]:
    """Return column "x" of the next batch that comes."""
    while isinstance(batch := stream.next(), int):
        assert batch == NO_ROW
    return [int(n) for n in batch["x"]]


@pytest.fixture
def feed() -> Iterator[Arrivals]:
    with Arrivals() as arrivals:
        yield arrivals


@pytest.fixture
def stream(feed: Arrivals) -> Iterator[Stream]:
    problems: list[BaseException] = []
    stream = Stream(EpochBatches(feed.reader, 4), problems.append)
    yield stream
    stream.close()
    assert not problems


def test_the_chief_trains_and_the_workers_are_fed_and_serve() -> None:
    nodes = plan_nodes(5, Roles(ps=1, chief="chief", evaluator=True), is_coordinated=True)
    flags = {
        node.name: (node.role.is_server, node.role.is_fed, node.role.finishes_job) for node in nodes
    }
    assert flags == {
        "ps:0": (True, False, False),
        "chief:0": (False, False, True),
        "evaluator:0": (False, False, False),
        "worker:0": (True, True, False),
        "worker:1": (True, True, False),
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"roles": Roles(ps=1)}, r"Roles\(ps=1\) needs a chief.*chief='chief'.*coordinator=False"),
        ({"roles": Roles(ps=2, chief="chief")}, "leaves no worker.*num_executors"),
        (
            {"roles": Roles(coordinator=True, chief="chief")},
            "coordinator=True.* needs parameter servers",
        ),
        (
            {"framework": "plain", "roles": Roles(coordinator=True, ps=1)},
            "'plain' has no parameter serv",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        sparkdl.launch(None, hang, None, 3, **{"executor": "local", **options})
    assert not processes()


def test_map_fun_runs_on_the_chief_while_ps_and_workers_serve_until_it_returns() -> None:
    def wait_and_name(args: None, ctx: NodeContext) -> str:
        assert list(ctx.batches(8, feed="go"))
        return ctx.job_name

    options: dict[str, Any] = {"framework": SERVES, "roles": Roles(ps=1, chief="chief")}
    with launch(wait_and_name, nodes=4, **options) as cluster:
        them = processes()
        assert cluster.feed(range(100)).rows == {"worker:0": 50, "worker:1": 50}
        unread = cluster.feed_async(range(100), 2)
        cluster.feed(range(1), feed="go", role="chief")
        assert cluster.results(SOON_S) == ["chief", None, None, None]
        assert unread.result(SOON_S).rows_used == 0
        assert all_gone(process.child for process in them.values())


def test_worker_that_dies_has_all_nodes_begin_anew(tmp_path: Path) -> None:
    def wait_once(gate: Gate, ctx: NodeContext) -> int:
        if ctx.generation == 0:
            gate.wait()
        return ctx.generation

    gate = Gate.at(tmp_path / "gate")
    options: dict[str, Any] = {"framework": SERVES, "roles": Roles(ps=1, chief="chief")}
    options |= {"max_restarts": 1, "feeding": Feeding(fed=False)}
    with launch(wait_once, gate, 3, **options) as cluster, gate.wait_until_reached():
        processes()["worker:0"].child.kill()
        assert cluster.results(SOON_S) == [1, None, None]


def test_map_fun_runs_on_all_nodes_without_a_coordinator() -> None:
    def name(args: None, ctx: NodeContext) -> str:
        return ctx.job_name

    options: dict[str, Any] = {"framework": SERVES, "roles": Roles(ps=1, coordinator=False)}
    with launch(name, nodes=3, **options) as cluster:
        assert cluster.results(SOON_S)[:2] == ["worker", "worker"]


@pytest.mark.parametrize(
    ("is_coordinated", "node_id"), [(False, 1), (True, 0), (True, 2)], ids=["none", "ps", "worker"]
)
def test_only_the_chief_of_servers_has_a_strategy(is_coordinated: bool, node_id: int) -> None:
    nodes = plan_nodes(3, Roles(ps=1, chief="chief"), is_coordinated=is_coordinated)
    world = build_world(0, {node: Address("h", node.node_id, "") for node in nodes})
    with socket.socket() as port:
        link = cast(AgentLink, None)
        ctx = NodeContext(world, world.member(node_id), ClusterSpec("c", nodes), link, port)
        with pytest.raises(ConfigError, match="on the chief of a cluster with Roles"):
            ctx.parameter_server_strategy()
        with pytest.raises(ConfigError, match=r"parameter_server_strategy\(\) first"):
            ctx.fed_dataset_fn(8)


def test_batches_go_on_from_epoch_to_epoch(feed: Arrivals, stream: Stream) -> None:
    feed.rows(6)
    feed.end_epoch(0)
    feed.end_epoch(1)  # of which this node has no row
    feed.rows(3, epoch=2)
    feed.end_epoch(2)
    assert [numbers(stream) for _ in range(3)] == [[0, 1, 2, 3], [4, 5], [6, 7, 8]]
    assert stream.next() == NO_ROW
    assert not stream.is_drained()
    assert feed.consumed == (9, 3)


def test_only_a_few_batches_are_read_before_they_are_wanted(feed: Arrivals, stream: Stream) -> None:
    feed.rows(*[4] * 10)
    assert numbers(stream) == [0, 1, 2, 3]
    assert numbers(stream) == [4, 5, 6, 7]
    assert stream.next()
    assert feed.reader._cursor.counts.rows <= 4 * 6


def test_stream_is_drained_once_nothing_is_on_its_way_to_a_step(
    feed: Arrivals, stream: Stream
) -> None:
    feed.rows(2)
    feed.end_epoch(0)
    feed.end()
    assert numbers(stream) == [0, 1]
    for _ in range(FLUSHED):
        assert not stream.is_drained()
        assert stream.next() == NO_ROW
    assert stream.is_drained()
    stream.finish()
    assert stream.next() == OVER


def test_terminated_stream_goes_on_with_a_later_feeding(feed: Arrivals, stream: Stream) -> None:
    feed.rows(40)
    assert numbers(stream) == [0, 1, 2, 3]
    stream.terminate()
    assert any(isinstance(message, Terminated) for message in feed.sent)
    assert stream.next() == NO_ROW
    feed.reader.hear(Reopened(FEED, 1))
    feed.rows(2, epoch=1)
    feed.end_epoch(1)
    assert numbers(stream) == [40, 41]


def test_another_stream_of_the_feed_takes_it_over(feed: Arrivals) -> None:
    problems: list[BaseException] = []

    def open_feed(batch_size: int, columns: Any, name: str, **options: Any) -> EpochBatches:
        assert options.pop("even") is False
        return EpochBatches(feed.reader, batch_size, columns, **options)

    streams = Streams(open_feed, problems.append)
    old = msgspec.json.encode(Wanted(1, "input", 2, ("x",), "short", False, 0))
    new = msgspec.json.encode(Wanted(2, "input", 3, ("x",), "short", False, 0))
    feed.rows(20)
    column = b'[{"name": "x", "dtype": "int64", "shape": [null]}]'
    assert [list(np.atleast_1d(a)) for a in streams.answer(b"next", old, column)] == [[0], [0, 1]]
    kind, values = streams.answer(b"next", new, column)
    assert (int(kind), list(values)) == (ROWS, [0, 1, 2])  # the epoch anew
    assert streams._stream(old).next() == OVER
    streams._stream(new).close()
    assert not problems
