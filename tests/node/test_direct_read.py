"""What a child asks its agent to read."""

from __future__ import annotations

from typing import cast

import msgspec
import pytest

import sparkdl
from sparkdl.control.channel import Local, ReadParquet
from sparkdl.core.errors import ConfigError
from sparkdl.core.spec import EVALUATOR, WORKER, ClusterSpec, NodeSpec
from sparkdl.core.world import Address, build_world
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


class Sent(list[Local]):
    """An agent that is only told."""

    @property
    def feeds(self) -> Sent:
        return self

    def own_reader(self, kind: str) -> FeedReader:
        return FeedReader(kind, self.append)

    def send(self, message: Local) -> None:
        self.append(message)


def context(node_id: int, sent: Sent) -> NodeContext:
    spec = ClusterSpec("c", tuple(m.node for m in WORLD.members), "plain", working_dir="/home/me")
    member = WORLD.member(node_id)
    return NodeContext(WORLD, member, spec, cast(AgentLink, sent), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("node_id", "sharers"), [(0, (0,)), (1, (1, 2)), (2, (1, 2))])
def test_trainers_share_the_rows_and_others_have_them_all(
    node_id: int, sharers: tuple[int, ...]
) -> None:
    sent = Sent()
    context(node_id, sent).parquet(["x", "s3://b/y"], 8, ["c"], options={"region": "eu"})
    paths = ("file:///home/me/x", "s3://b/y")
    asked = ReadParquet("parquet", paths, sharers, node_id, ("c",), {"region": "eu"})
    assert sent == [asked]


def test_files_may_be_given_in_place_of_a_feed() -> None:
    sent = Sent()
    files = sparkdl.parquet("s3://b/y", ["c", "d"], {"region": "eu"})
    context(1, sent).batches(8, feed=files)
    context(1, sent).batches(8, ["c"], feed=files)
    whole = ReadParquet("parquet", ("s3://b/y",), (1, 2), 1, ("c", "d"), {"region": "eu"})
    assert sent == [whole, msgspec.structs.replace(whole, columns=("c",))]


def test_mask_of_a_padded_column_is_made_of_the_column_in_the_files() -> None:
    sent = Sent()
    files = sparkdl.parquet("s3://b/y")
    batches = context(1, sent).batches(8, ["c.mask", "d"], feed=files, pad={"c": 3})
    assert sent == [ReadParquet("parquet", ("s3://b/y",), (1, 2), 1, ("c", "d"), {})]
    assert batches.columns == ("c.mask", "d")


def test_order_is_random_only_where_rows_are_shuffled() -> None:
    sent = Sent()
    for shuffle in (False, True, 100):
        context(1, sent).parquet("x", 8, epochs=3, shuffle=shuffle, seed=5)
    assert [(m.epochs, m.seed) for m in sent if isinstance(m, ReadParquet)] == [
        (3, None),
        (3, 5),
        (3, 5),
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"epochs": 0}, "epochs=0 must be at least 1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"path": 7}, "paths=7 must be a path"),
        ({"columns": "c"}, "columns='c' must be a list"),
    ],
)
def test_what_cannot_be_is_refused_before_the_agent_is_asked(
    arguments: dict[str, object], text: str
) -> None:
    sent = Sent()
    with pytest.raises(ConfigError, match=text):
        context(1, sent).parquet(**{"path": "x", "batch_size": 8, **arguments})  # type: ignore[arg-type]
    assert sent == []
