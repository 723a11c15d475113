"""What is told of rows that were not used, and of feeds that nobody feeds."""

from __future__ import annotations

from typing import Any

import pytest

from sparkdl.control.rows import EpochCount, FeedCount, ReadCounts
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.core.world import Address, World, build_world
from sparkdl.driver.feeds.coverage import CallHistory, FeedRequest
from sparkdl.driver.feeds.report import reads_extra_epochs, report, stalled_waits
from sparkdl.driver.feeds.state import Feed, Nodes, Run
from sparkdl.feed.transfer.messages import FeedSpec

SPEC = ClusterSpec("c", plan_nodes(2))


def test_nodes_that_read_what_nobody_feeds_are_named_with_what_is_fed() -> None:
    fed = FeedCount("input", began=0)
    feeds = {(0, "input"): fed, (0, "inputs"): FeedCount("inputs"), (1, "input"): fed}
    assert stalled_waits(SPEC, feeds).startswith(
        "map_fun waits for rows that the driver has not fed: 'inputs' on worker:0. The driver has "
        "fed 'input' to worker:0, worker:1; did you mean 'input'? Give feed= "
    )
    assert "The driver has fed nothing." in stalled_waits(SPEC, {(1, "input"): FeedCount("input")})


def test_feed_that_began_brought_rows_or_is_not_read_any_more_is_no_reason() -> None:
    for count in (
        FeedCount("input", began=3),
        FeedCount("input", rows_received=1),
        FeedCount("input", closed=True),
    ):
        assert stalled_waits(SPEC, {(0, "input"): count}) == ""


def test_first_node_beyond_the_end_of_a_feed_is_told_of_and_no_other() -> None:
    extra = FeedCount("input", given=ReadCounts(extra_epochs=1))
    assert reads_extra_epochs("worker:0", FeedCount("input"), {}) is None
    assert "map_fun on worker:0 loops over another epoch" in (
        reads_extra_epochs("worker:0", extra, {}) or ""
    )
    assert reads_extra_epochs("worker:1", extra, {(0, "input"): extra}) is None
    assert reads_extra_epochs(
        "worker:1", extra, {(0, "other"): FeedCount("other", given=ReadCounts(extra_epochs=1))}
    )


def told_of(world: World, refused: int, rows_due: dict[int, int], **nodes: Any) -> str:
    """Return the warning at the end of a call; `nodes` is what is known of them then."""
    spec = FeedSpec("f", 0, "", (), "token")
    call = CallHistory("f").add(FeedRequest("data"))
    before = dict.fromkeys(rows_due, FeedCount("f"))
    members = tuple(m for m in world.members if m.node.node_id in rows_due)
    run = Run(
        *(call, tuple(call.left()), 0, spec, members, before, 0, 1, 0, 0.0),
        refused=refused,
        rows_due=rows_due,
    )
    feed = Feed(CallHistory("f"), spec, 0.0, Nodes(0, world, **nodes))
    told, warning = report(feed, run)
    assert told.rows_unused == refused + sum(rows_due.values())
    return warning


@pytest.mark.parametrize(
    ("now", "finished", "why"),
    [
        (FeedCount("f"), [0], "map_fun has returned or called terminate() on worker:0"),
        (FeedCount("f", closed_to=4, cut=EpochCount(4)), [], "or called terminate() on worker:0"),
        (FeedCount("f"), [], "too few for a step on every node"),
    ],
)
def test_warning_names_who_wants_no_rows(now: FeedCount, finished: list[int], why: str) -> None:
    world = build_world(0, {node: Address("h", 1, "") for node in SPEC.nodes})
    warning = told_of(world, 2, {0: 7, 1: 0}, counts={0: now}, finished=frozenset(finished))
    assert "Feed 'f': 9 rows were not used" in warning
    assert why in warning
    assert "worker:1" not in warning
