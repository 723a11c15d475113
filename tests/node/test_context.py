"""What `map_fun` is told about its place in the world."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

import sparkdl
from sparkdl.control.channel import Local, Reported
from sparkdl.core.errors import ConfigError
from sparkdl.core.spec import EVALUATOR, PS, WORKER, ClusterSpec, NodeSpec, Role, chief_named
from sparkdl.core.world import Address, World, build_world
from sparkdl.feed.reader.files import FileOrder
from sparkdl.feed.reader.reader import FeedReader
from sparkdl.node.context import NodeContext


@pytest.fixture
def port() -> Iterator[socket.socket]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held


def world_of(*roles_and_hosts: tuple[Role, int, str], generation: int = 0) -> World:
    nodes = {
        NodeSpec(node_id, role, index): Address(host, 7000 + node_id, "")
        for node_id, (role, index, host) in enumerate(roles_and_hosts)
    }
    return build_world(generation, nodes)


MIXED = world_of(
    (PS, 0, "a"), (chief_named("master"), 0, "b"), (EVALUATOR, 0, "b"), (WORKER, 0, "a"),
    (WORKER, 1, "b"), generation=2,
)  # fmt: skip


def context(
    port: socket.socket,
    world: World = MIXED,
    node_id: int = 0,
    default_fs: str = "file://",
    working_dir: str = "/home/me",
    link: Any = None,
) -> NodeContext:
    spec = ClusterSpec(
        "c",
        tuple(member.node for member in world.members),
        framework="plain",
        default_fs=default_fs,
        working_dir=working_dir,
    )
    return NodeContext(world, world.member(node_id), spec, link, port)


@pytest.mark.parametrize(
    ("node_id", "job", "index", "rank", "local_rank", "is_chief"),
    [
        (1, "master", 0, 0, 0, True),
        (3, "worker", 0, 1, 0, False),
        (4, "worker", 1, 2, 1, False),
        (0, "ps", 0, 3, 1, False),
        (2, "evaluator", 0, 4, 2, False),
    ],
)
def test_each_node_knows_its_place(
    port: socket.socket,
    node_id: int,
    job: str,
    index: int,
    rank: int,
    local_rank: int,
    is_chief: bool,
) -> None:
    ctx = context(port, node_id=node_id)
    assert (ctx.job_name, ctx.task_index) == (job, index)
    assert ctx.executor_id == ctx.worker_num == node_id
    assert (ctx.rank, ctx.local_rank, ctx.is_chief) == (rank, local_rank, is_chief)
    assert ctx.generation == 2
    assert job in repr(ctx)


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 0), ("", 0), ("-1", 0), ("0", 1), ("GPU-a,GPU-b", 2), ("2, 3,-1,4", 2), ("MIG-x", 1)],
)
def test_gpus_that_a_node_was_given_are_counted(
    port: socket.socket, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert context(port).num_gpus == count


def test_port_is_held_until_it_is_released_and_a_second_release_only_says_so(
    port: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    ctx = context(port)
    assert ctx.tmp_socket is port
    assert port.fileno() >= 0
    ctx.release_port()
    assert ctx.tmp_socket is None
    assert port.fileno() == -1
    assert "released already" not in caplog.text
    ctx.release_port()
    assert "released already" in caplog.text


class Said:
    def __init__(self) -> None:
        self.messages: list[Local] = []

    def send(self, message: Local) -> None:
        self.messages.append(message)


def test_steps_and_numbers_beside_them_are_told(port: socket.socket) -> None:
    said = Said()
    ctx = context(port, link=said)
    ctx.report(step=np.int64(3), loss=np.float32(0.5), rows=7)
    ctx.report(4, loss=float("nan"), norm=-np.inf)
    first, second = said.messages
    assert first == Reported(3, {"loss": 0.5, "rows": 7.0})
    assert second == Reported(4, {"loss": "nan", "norm": "-inf"})


@pytest.mark.parametrize(
    ("step", "metrics", "words"),
    [
        (-1, {}, "steps are 0 or more"),
        (1.5, {}, r"report\(step=1.5\): must be a whole number"),
        ("1", {}, "must be a whole number"),
        (1, {"loss": "low"}, r"report\(loss='low'\): must be a number"),
        (1, {"loss": np.zeros(2)}, "must be a number"),
    ],
)
def test_report_of_what_is_no_number_is_refused(
    port: socket.socket, step: Any, metrics: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        context(port, link=Said()).report(step, **metrics)


def test_checkpoint_needs_a_place(port: socket.socket) -> None:
    with pytest.raises(ConfigError, match="launch the cluster with checkpoint_dir="):
        context(port, node_id=3).checkpoint(1).__enter__()


class Asked(list[FileOrder]):
    @property
    def feeds(self) -> Asked:
        return self

    def own_files(self, memory_nbytes: int | None) -> Asked:
        return self

    @property
    def reader(self) -> FeedReader:
        return FeedReader("parquet", lambda message: None)

    def begin(self, order: FileOrder) -> None:
        self.append(order)

    def context(self, node_id: int = 1) -> NodeContext:
        world = world_of((EVALUATOR, 0, "a"), (WORKER, 0, "a"), (WORKER, 1, "b"))
        return context(cast(Any, None), world, node_id, link=self)


@pytest.mark.parametrize(("node_id", "sharers"), [(0, (0,)), (1, (1, 2)), (2, (1, 2))])
def test_trainers_share_rows_and_others_have_all(node_id: int, sharers: tuple[int, ...]) -> None:
    sent = Asked()
    files = sparkdl.parquet(["x", "s3://b/y"], ["c"], {"region": "eu"})
    sent.context(node_id).batches(8, feed=files)
    paths = ("file:///home/me/x", "s3://b/y")
    asked = FileOrder(paths, sharers, node_id, ("c",), {"region": "eu"})
    assert sent == [asked]


def test_mask_of_a_padded_column_is_made_of_the_column_in_the_files() -> None:
    sent = Asked()
    files = sparkdl.parquet("s3://b/y")
    batches = sent.context().batches(8, ["c.mask", "d"], feed=files, pad={"c": 3})
    assert sent == [FileOrder(("s3://b/y",), (1, 2), 1, ("c", "d"), {})]
    assert batches.columns == ("c.mask", "d")


def test_order_is_random_only_where_rows_are_shuffled() -> None:
    sent = Asked()
    for shuffle in (False, True, 100):
        sent.context().batches(8, feed=sparkdl.parquet("x"), shuffle=shuffle, seed=5)
    assert [each.seed for each in sent] == [None, 5, 5]


def test_what_cannot_be_is_refused_before_anything_is_read() -> None:
    sent = Asked()
    with pytest.raises(ConfigError, match="batch_size=0"):
        sent.context().batches(0, feed=sparkdl.parquet("x"))
    with pytest.raises(ConfigError, match="columns='c' must be a list"):
        sent.context().batches(8, "c", feed=sparkdl.parquet("x"))
    assert sent == []
