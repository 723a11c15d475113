"""The history of calls: what is fed again is what no checkpoint covers, no more and no less."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, strategies as st

from sparkdl.control.rows import UNKNOWN, CallShape, EpochRows, FeedCoverage
from sparkdl.core.errors import ConfigError
from sparkdl.core.row_ranges import merge_ranges
from sparkdl.driver.feeds.coverage import Call, CallHistory, CoverageStore, FeedRequest

Row = tuple[int, int, int, int]
"""Call, epoch, partition, row."""


def fed(history: CallHistory, call: Call, sizes: tuple[int, ...] = (10,)) -> None:
    """Feed all that is left of a call."""
    history.allocate_epochs(call, [left.epoch for left in call.left()])
    history.record_shape(call, len(sizes), dict(enumerate(sizes)))
    history.mark_fed(call, has_ended_early=False)


def ended(history: CallHistory) -> CallHistory:
    """Begin the next generation."""
    history.begin(history._generation + 1)
    return history


def test_a_call_that_ended_early_is_covered_once_nodes_are_beyond_it() -> None:
    history = CallHistory("input")
    call, other = history.add(FeedRequest("a", epochs=2)), history.add(FeedRequest("b"))
    history.allocate_epochs(call, [0, 1])
    history.record_shape(call, 1, {0: 10})
    history.mark_fed(call, has_ended_early=True)
    history.allocate_epochs(other, [0])
    assert history.coverage(0, [{1: {0: ((0, 4),)}}]).calls == 0, "they may read more of it"
    assert history.coverage(0, [{2: {}}]).calls == 1


def test_calls_before_the_one_under_way_are_fed_first_and_forgotten_once_covered() -> None:
    history = CallHistory("input")
    first, second = history.add(FeedRequest("a")), history.add(FeedRequest("b"))
    fed(history, first)
    assert history.next(first) is None
    assert history.next(second) is second
    history.allocate_epochs(second, [0])
    ended(history)
    assert history.next(second) is first
    fed(history, first)
    assert history.next(second) is second
    fed(history, second)
    history.mark_covered(history.coverage(1, [{0: {0: ((0, 10),)}}]))
    assert (history.covered_to(1), history.covered_to(0)) == (1, 0)
    ended(history)
    assert history.next() is second, "the first is covered"
    history.mark_covered(FeedCoverage(2))
    assert history.covered_to(2) == history._next_epoch
    assert history.coverage(2, []) == FeedCoverage(2)
    assert history.coverage(2, []) == FeedCoverage(2)
    assert not history._calls
    assert second.request.data is None


def test_a_call_that_nobody_wanted_more_of_is_over_once_rows_behind_it_are_covered() -> None:
    history = CallHistory("input")
    endless, empty, then = (
        history.add(FeedRequest("a", 5)),
        history.add(FeedRequest([])),
        history.add(FeedRequest("b")),
    )
    history.allocate_epochs(endless, range(5))
    history.mark_fed(endless, has_ended_early=True)
    fed(history, empty, (0,))
    assert history.coverage(0, [{2: {0: ((0, 9),)}}]).calls == 0, "it may go on there"
    fed(history, then)
    covered = history.coverage(0, [{2: {0: ((0, 9),)}, 6: {0: ((0, 4),)}}])
    assert covered.calls == 2
    assert list(covered.rows) == [2]
    history.mark_covered(covered)
    assert history.next() is None
    assert ended(history).next() is then


def test_micro_batches_that_no_checkpoint_covers_are_told_of_and_not_fed_again() -> None:
    history = CallHistory("input")
    calls = [history.add(FeedRequest("rows", is_micro_batch=True)) for _ in range(3)]
    for call in calls[:2]:
        fed(history, call)
        assert call.request.data is None, "Spark's micro-batches come once"
    covered = history.coverage(0, [{0: {0: ((0, 10),)}, 1: {0: ((0, 4),)}}])
    assert covered.rows == {-1: {1: {}}, -2: {0: {0: ((0, 4),)}}}
    history.mark_covered(covered)
    assert history.begin(1) == [calls[1]]
    assert calls[1].rows_covered == 4
    assert history.next() is calls[2], "the one under way is fed again"
    later = CallHistory("input", restored=covered)
    assert later.add(FeedRequest("rows", is_micro_batch=True)).left(), "numbers of another run"
    assert later.add(FeedRequest("rows")).left()


def test_without_restarts_or_checkpoints_data_are_let_go_of_once_they_are_fed() -> None:
    history = CallHistory("input", keeps=False)
    call = history.add(FeedRequest("rows"))
    fed(history, call)
    assert call.request.data is None
    assert ended(history).next() is None


@pytest.mark.parametrize(
    ("before", "now", "text"),
    [
        (CallShape(3), CallShape(4), "4 partitions, and 3 when .* the same data, in the same"),
        (CallShape(1, {0: 10}), CallShape(1, {0: 12}), "10 rows of files, and there are 12 now"),
        (CallShape(1, {0: 10}), CallShape(1, {0: 10}, "n"), "another reader=.*reader='spark'"),
        (CallShape(1, {0: 10}, "n"), UNKNOWN, "another reader=.*reader='nodes'"),
        (CallShape(1, {0: 10}, "n"), CallShape(1, {0: 10}, "m"), "or with other Parquet files"),
    ],
)
def test_other_data_than_a_checkpoint_was_made_with_are_refused(
    before: CallShape, now: CallShape, text: str
) -> None:
    covered = FeedCoverage(0, {0: {0: {0: ((0, 5),)}}}, {0: before})
    history = CallHistory("input", restored=covered)
    with pytest.raises(ConfigError, match=text):
        history.add(FeedRequest("data", shape=now))


def test_feeds_that_nodes_read_themselves_are_covered_by_their_epochs() -> None:
    coverage = CoverageStore()
    history = coverage.history("input")
    history.allocate_epochs(history.add(FeedRequest("data")), [0])
    parts: dict[int, Mapping[str, EpochRows]] = {
        0: {"own": {3: {0: ((0, 5),)}}, "input": {0: {1: ((0, 2),)}}},
        1: {"own": {3: {0: ((5, 7),)}}},
    }
    covered = coverage.coverage(0, parts)
    assert covered["own"].rows == {0: {3: {0: ((0, 7),)}}}
    assert covered["input"].rows == {0: {0: {1: ((0, 2),)}}}
    coverage.mark_covered(covered)
    more = coverage.coverage(1, {0: {"own": {4: {0: ((0, 1),)}}}})
    assert more["own"].rows == {0: {3: {0: ((0, 7),)}, 4: {0: ((0, 1),)}}}
    assert more["input"] == covered["input"]


@dataclass
class World:
    """Calls, what was used of them, and what the last checkpoint covers: row by row."""

    sizes: list[tuple[int, ...]]
    epochs: list[int]
    covered: set[Row] = field(default_factory=set)

    def rows(self) -> list[Row]:
        return [
            (call, epoch, partition, row)
            for call, sizes in enumerate(self.sizes)
            for epoch in range(self.epochs[call])
            for partition, size in enumerate(sizes)
            for row in range(size)
        ]


SIZES = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)
WORLDS = st.lists(st.tuples(SIZES, st.integers(1, 3)), min_size=1, max_size=4)


def as_parts(used: list[tuple[int, Row]], nodes: int, data: st.DataObject) -> list[EpochRows]:
    """Deal rows, each with the epoch of the generation, out to nodes, as they tell of them."""
    parts: list[EpochRows] = [{} for _ in range(nodes)]
    for epoch, (_, _, partition, row) in used:
        rows = parts[data.draw(st.integers(0, nodes - 1))].setdefault(epoch, {})
        ranges = [*rows.get(partition, ()), (row, row + 1)]
        rows[partition] = tuple(merge_ranges(ranges))
    return parts


@given(WORLDS, st.integers(1, 5), st.integers(1, 3), st.data())
def test_rows_that_are_fed_again_are_exactly_those_that_no_checkpoint_covers(
    calls: list[tuple[tuple[int, ...], int]], generations: int, nodes: int, data: st.DataObject
) -> None:
    """Whatever was used, in whatever order, and wherever it stopped; also by a run after it."""
    world = World([sizes for sizes, _ in calls], [epochs for _, epochs in calls])
    history = CallHistory("input")
    made = [history.add(FeedRequest("data", epochs)) for _, epochs in calls]
    for generation in range(generations):
        assert history.begin(generation) == []
        if data.draw(st.booleans()):  # another run
            stored = msgspec.json.encode(history.coverage(generation, []))
            covered = msgspec.json.decode(stored, type=FeedCoverage)
            history = CallHistory("input", restored=covered)
            made = [history.add(FeedRequest("data", epochs)) for _, epochs in calls]
            history.begin(generation)
        left_over = [row for row in world.rows() if row not in world.covered]
        got: list[tuple[int, Row]] = []
        while (call := history.next()) is not None:
            number = made.index(call)
            left = call.left()
            first = history.allocate_epochs(call, [each.epoch for each in left])
            for i, each in enumerate(left):
                done = {p: set().union(*(range(*r) for r in rs)) for p, rs in each.done.items()}
                skipped = call.covered_partitions(each.done)
                for partition, size in enumerate(world.sizes[number]):
                    rows = [r for r in range(size) if r not in done.get(partition, ())]
                    assert not (rows and partition in skipped)
                    got += [(first + i, (number, each.epoch, partition, row)) for row in rows]
            sizes = world.sizes[number]
            if data.draw(st.booleans(), "the job came to its end"):
                history.record_shape(call, len(sizes), dict(enumerate(sizes)))
            history.mark_fed(call, has_ended_early=False)
        assert [row for _, row in got] == left_over
        used = got[: data.draw(st.integers(0, len(got)), "so far the nodes have come")]
        if data.draw(st.booleans(), "uneven"):
            used = [each for each in used if data.draw(st.booleans())]
        now = history.coverage(generation, as_parts(used, nodes, data))
        if data.draw(st.booleans(), "the checkpoint is complete"):
            history.mark_covered(now)
            world.covered = world.covered | {row for _, row in used}
