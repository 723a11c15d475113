"""What a child reads of files."""

from __future__ import annotations

from typing import cast

import pytest

import sparkdl
from sparkdl.core.errors import ConfigError
from sparkdl.core.spec import EVALUATOR, WORKER, ClusterSpec, NodeSpec
from sparkdl.core.world import Address, build_world
from sparkdl.feed.reader.files import FileOrder
from sparkdl.feed.reader.reader import FeedReader
from sparkdl.node.context import NodeContext
from sparkdl.node.link import AgentLink

WORLD = build_world(
    0,
    {
        NodeSpec(0, EVALUATOR, 0): Address("a", 1, ""),
        NodeSpec(1, WORKER, 0): Address("a", 2, ""),
        NodeSpec(2, WORKER, 1): Address("b", 1, ""),
    },
)


class Asked(list[FileOrder]):
    """Takes the orders to read."""

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


def context(node_id: int, sent: Asked) -> NodeContext:
    spec = ClusterSpec("c", tuple(m.node for m in WORLD.members), "plain", working_dir="/home/me")
    member = WORLD.member(node_id)
    return NodeContext(WORLD, member, spec, cast(AgentLink, sent), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("node_id", "sharers"), [(0, (0,)), (1, (1, 2)), (2, (1, 2))])
def test_trainers_share_the_rows_and_others_have_them_all(
    node_id: int, sharers: tuple[int, ...]
) -> None:
    sent = Asked()
    files = sparkdl.parquet(["x", "s3://b/y"], ["c"], {"region": "eu"})
    context(node_id, sent).batches(8, feed=files)
    paths = ("file:///home/me/x", "s3://b/y")
    asked = FileOrder(paths, sharers, node_id, ("c",), {"region": "eu"})
    assert sent == [asked]


def test_mask_of_a_padded_column_is_made_of_the_column_in_the_files() -> None:
    sent = Asked()
    files = sparkdl.parquet("s3://b/y")
    batches = context(1, sent).batches(8, ["c.mask", "d"], feed=files, pad={"c": 3})
    assert sent == [FileOrder(("s3://b/y",), (1, 2), 1, ("c", "d"), {})]
    assert batches.columns == ("c.mask", "d")


def test_order_is_random_only_where_rows_are_shuffled() -> None:
    sent = Asked()
    for shuffle in (False, True, 100):
        context(1, sent).batches(8, feed=sparkdl.parquet("x"), shuffle=shuffle, seed=5)
    assert [each.seed for each in sent] == [None, 5, 5]


def test_what_cannot_be_is_refused_before_anything_is_read() -> None:
    sent = Asked()
    with pytest.raises(ConfigError, match="batch_size=0"):
        context(1, sent).batches(0, feed=sparkdl.parquet("x"))
    with pytest.raises(ConfigError, match="columns='c' must be a list"):
        context(1, sent).batches(8, "c", feed=sparkdl.parquet("x"))
    assert sent == []
