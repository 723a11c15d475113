"""Batches of one epoch: every row once and in order, as many steps as the others take."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, strategies as st

from sparkdl.control.channel import Consumed, Reclaim
from sparkdl.core.errors import ConfigError, EndOfFeedError, FeedTypeError, FrameworkMissingError
from sparkdl.core.row_ranges import Slice
from sparkdl.feed.reader.batches import EpochBatches, Names, Slices, Tail, arrange
from sparkdl.feed.reader.cursor import HEAD_STEPS
from tests.doubles.feeds import FEED, Arrivals, Running, vectors


def values(batches: Iterator[Any] | EpochBatches) -> list[list[int]]:
    return [batch["x"].tolist() for batch in batches]


def flat(batches: Iterator[Any] | EpochBatches) -> list[int]:
    return [value for batch in values(batches) for value in batch]


def test_superseded_iterator_gets_nothing_more_even_of_a_segment_it_has_begun() -> None:
    with Arrivals() as it:
        batches = EpochBatches(it.reader, 2)
        it.rows(10)
        it.end_epoch(0)
        old = iter(batches)
        assert next(old)["x"].tolist() == [0, 1]
        new = iter(batches)
        assert next(new)["x"].tolist() == [0, 1]
        assert values(old) == []
        assert flat(new) == list(range(2, 10))
        assert it.consumed == (10, 1)


def test_end_of_the_feed_within_an_epoch_ends_the_iteration() -> None:
    with Arrivals() as it:
        it.rows(5)
        it.end()
        batches = EpochBatches(it.reader, 3)
        assert values(batches) == [[0, 1, 2], [3, 4]]
        assert it.consumed == (5, 0)
        assert values(batches) == [], "not the same rows again"


def test_first_iteration_beyond_the_end_is_empty_with_a_warning_and_the_second_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Arrivals() as it:
        batches = EpochBatches(it.reader, 3)
        for epoch in range(2):
            it.rows(4, epoch=epoch)
            it.end_epoch(epoch)
        it.end()
        assert [flat(batches), flat(batches)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert not caplog.records
        assert flat(batches) == []
        assert "feed 'input' ended after 2 epochs" in caplog.text
        with pytest.raises(EndOfFeedError, match=r"ended after 2 epochs, .* `while ctx.has_epoch"):
            flat(batches)


def test_loop_that_asks_for_an_epoch_ends_with_the_feed(caplog: pytest.LogCaptureFixture) -> None:
    with Arrivals() as it:
        batches = EpochBatches(it.reader, 3)
        it.rows(4)
        it.end_epoch(0, again=True)
        it.end_epoch(1)
        it.end_epoch(2, {0: 0})
        it.end()
        found = []
        while it.reader.has_epoch():
            found.append(flat(batches))
        assert found == [[0, 1, 2, 3], [0, 1, 2, 3], []], "what was fed without rows is an epoch"
        assert not caplog.records


def test_asking_for_an_epoch_moves_nothing_and_what_is_left_of_one_is_one() -> None:
    with Arrivals() as it:
        asking = Running(it.reader.has_epoch)
        it.waits.wait_for_waiter()
        it.rows(4)
        assert asking.result()
        batches = EpochBatches(it.reader, 1)
        reading = iter(batches)
        assert next(reading)["x"].tolist() == [0]
        assert it.reader.has_epoch()
        assert next(reading)["x"].tolist() == [1]
        it.end_epoch(0)
        assert flat(reading) == [2, 3]


def test_world_that_goes_on_may_count_epochs_from_zero(caplog: pytest.LogCaptureFixture) -> None:
    with Arrivals() as it:
        it.reader.registry.is_resumed = True
        batches = EpochBatches(it.reader, 2)
        it.rows(2)
        it.end_epoch(0)
        it.end()
        assert [flat(batches) for _ in range(5)] == [[0, 1], [], [], [], []]
        assert len(caplog.records) == 1
        with pytest.raises(EndOfFeedError, match="ended after 1 epoch,"):
            while True:
                flat(batches)


def test_node_without_a_row_cannot_take_part_in_a_step() -> None:
    with Arrivals() as it:
        it.end_epoch(0, {0: 17, 1: 0, 2: 5})
        with pytest.raises(ConfigError, match=r"22 rows for 3 nodes"):
            list(EpochBatches(it.reader, 2, is_even=True))


def test_pressure_that_comes_while_an_epoch_is_padded_is_forgotten_with_it_and_told() -> None:
    """The agent presses again when it is told of the new epoch."""
    with Arrivals() as it:
        it.reader.on_message(Reclaim(FEED))
        it.rows(2)
        it.end_epoch(0, {0: 6, 1: 2})
        batches = iter(EpochBatches(it.reader, 2, is_even=True))
        for _ in range(2):
            next(batches)
        it.rows(2, epoch=1)
        it.reader.on_message(Reclaim(FEED))
        assert len(list(batches)) == 1
        assert it.consumed == (2, 1)


@pytest.mark.parametrize("shuffle", [False, True, 5])
def test_sparse_and_dense_vectors_are_rows_of_one_array(shuffle: bool | int) -> None:
    with Arrivals() as it:
        for start, stop in ((0, 7), (7, 8), (8, 9), (9, 20)):  # row 8 is dense
            it.batch(vectors(start, stop, 4))
        it.end_epoch(0)
        x, y = [], []
        for batch in EpochBatches(it.reader, 3, ("x", "y"), shuffle=shuffle):
            assert batch["x"].dtype == "float64"
            x += batch["x"].tolist()
            y += batch["y"].tolist()
        assert x == [[row, 0, 0, 1] for row in y]
        assert sorted(y) == list(range(20))


@pytest.mark.parametrize(
    ("depth", "options"),
    [(0, {}), (0, {"shuffle": True}), (0, {"tail": "pad"}), (1, {}), (1, {"shuffle": True})],
    ids=str,
)
def test_sparse_rows_take_the_memory_of_one_batch_only(depth: int, options: dict[str, Any]) -> None:
    """At depth 1 rows are arrays of vectors."""
    width, size = 100_000, 4
    with Arrivals() as it:
        for start in range(0, 402, 201):  # 160 MB each if it were dense
            it.batch(vectors(start, start + 201, width, depth))
        it.end_epoch(0)
        batches = EpochBatches(it.reader, size, **options)
        tracemalloc.start()
        try:
            seen = [
                int(row.flat[0])
                for batch in batches
                for row, weight in zip(batch["x"], batch.get("sample_weight", [1] * size))  # noqa: B905
                if weight
            ]
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert sorted(seen) == list(range(402))
        assert peak < 3 * size * width * 8 + 200_000


@pytest.mark.parametrize(
    "options", [{}, {"shuffle": 5}, {"tail": "pad"}, {"tail": "drop"}, {"is_even": True}]
)
def test_vectors_that_stay_sparse_are_csr_arrays_of_the_same_rows(options: dict[str, Any]) -> None:
    with Arrivals() as it:
        for start, stop in ((0, 7), (7, 8), (8, 9), (9, 20)):  # row 8 is dense
            it.batch(vectors(start, stop, 4))
        it.end_epoch(0, {0: 20, 1: 26})
        found: list[Any] = list(EpochBatches(it.reader, 6, sparse=("x",), **options))
    assert all(each["x"].shape == (len(each["y"]), 4) for each in found)
    x = [row for each in found for row in each["x"].toarray().tolist()]
    y = [row for each in found for row in each["y"].tolist()]
    weights = [w for each in found for w in each.get("sample_weight", [1] * len(each["y"]))]
    assert x == [[row, 0, 0, 1] if w else [0] * 4 for row, w in zip(y, weights, strict=True)]
    rows = sorted(row for row, w in zip(y, weights, strict=True) if w)
    assert rows[-20:] == [*range(18 if options.get("tail") == "drop" else 20)]
    if "is_even" in options:
        assert len(found) == 5, "as many steps as the other node"


def test_sparse_options_and_columns_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with Arrivals() as it:
        for options, reason in (
            ({"sparse": "x"}, "sparse='x': must be a list of the names of columns"),
            ({"sparse": ("x",), "pad": {"x": 4}}, "sparse= and pad= name 'x'"),
        ):
            with pytest.raises(ConfigError, match=reason):
                EpochBatches(it.reader, 4, **options)
        it.batch(vectors(0, 3, 4))
        it.batch(vectors(3, 5, 7))
        it.end_epoch(0)
        for name, error, reason in (
            ("z", ConfigError, "sparse= names 'z': must name columns that are read, which are x"),
            ("y", FeedTypeError, "column 'y' holds int64: sparse= takes columns of Spark ML vect"),
            ("x", FeedTypeError, "column 'x' holds vectors of 4 to 7 elements, which must have"),
        ):
            with pytest.raises(error, match=reason):
                list(EpochBatches(it.reader, 4, sparse=(name,)))
        monkeypatch.setitem(sys.modules, "scipy.sparse", None)
        with pytest.raises(FrameworkMissingError, match=r"sparse= needs SciPy.*pip install scipy"):
            EpochBatches(it.reader, 4, sparse=("x",))


@given(st.lists(st.integers(1, 12), max_size=10), st.integers(1, 15), st.lists(st.booleans()))
def test_batches_are_in_order(segments: list[int], batch_size: int, pressures: list[bool]) -> None:
    with Arrivals() as it:
        it.rows(*segments)
        it.end_epoch(0)
        pressing = iter(pressures)
        found = []
        for batch in EpochBatches(it.reader, batch_size):
            found.append(batch["x"].tolist())
            if next(pressing, False):
                it.reader.on_message(Reclaim(FEED))
        rows = list(range(sum(segments)))
        assert found == [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
        assert it.consumed == (len(rows), 1)
        assert it.released == len(segments)


def test_epoch_that_is_left_early_begins_again_in_another_order_and_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Arrivals() as it:
        it.rows(30, 30, 30)
        for epoch in range(2):
            it.end_epoch(epoch, again=epoch == 0)
        batches = EpochBatches(it.reader, 6, shuffle=True)
        orders = []
        for left in range(3):
            loop = iter(batches)
            assert ("left early twice" in caplog.text) == (left > 1)
            orders.append([next(loop)["x"].tolist() for _ in range(3)])
        for _ in range(2):
            whole = values(batches)
            orders.append(whole[:3])
            assert sorted(v for batch in whole for v in batch) == list(range(90))
        assert len({str(order) for order in orders}) == 5, "another order each time"
        it.reader.report()
        given = [m.given for m in it.sent if isinstance(m, Consumed)][-1]
        assert (given.rows, given.again) == (180, 3 * 18)
        assert caplog.text.count("left early twice") == 1


def test_loops_of_so_many_steps_go_on_behind_each_other_over_the_ends_of_epochs() -> None:
    with Arrivals() as it:
        for epoch in range(3):
            it.rows(7, 7, epoch=epoch)
            it.end_epoch(epoch)
        it.end()
        batches = EpochBatches(it.reader, 2, steps=3)
        found = []
        while it.reader.has_epoch():
            found.append(values(EpochBatches(it.reader, 2, steps=3)))
        assert [len(each) for each in found] == [3] * 7, "21 batches, and no loop is empty"
        assert [v for each in found for batch in each for v in batch] == list(range(42))
        assert it.consumed == (42, 3)
        assert it.released == 6
        assert flat(batches) == [], "one loop beyond the end is empty, as without steps"
        with pytest.raises(EndOfFeedError):
            flat(batches)


@pytest.mark.parametrize("taken", [1, 3, HEAD_STEPS, HEAD_STEPS + 2])
def test_loop_of_so_many_steps_that_was_only_looked_at_begins_again(taken: int) -> None:
    with Arrivals() as it:
        it.rows(*[1] * 40)
        it.end_epoch(0)
        batches = EpochBatches(it.reader, 1, steps=15)
        for _ in range(2):
            looking = iter(batches)
            for _ in range(taken):
                next(looking)
        old = looking
        first = 0 if taken <= HEAD_STEPS else 2 * taken
        assert flat(batches) == list(range(first, first + 15))
        assert values(old) == [], "a loop that was left is given nothing more"
        assert it.reader.steps == first + 15 + (2 * taken if not first else 0) - min(first, 0)
        whole = iter(EpochBatches(it.reader, 1))
        assert next(whole)["x"].tolist() == [0], "one without steps begins the epoch again"
        assert flat(batches) == list(range(15)), "and so does the next one with steps"


@pytest.mark.parametrize("read", [0, 2])
def test_loop_that_waits_in_a_thread_hands_its_batch_to_the_one_that_follows(read: int) -> None:
    with Arrivals() as it:
        it.rows(*[1] * read)
        batches = EpochBatches(it.reader, 1, steps=6)
        old = iter(batches)
        for _ in range(read):
            next(old)
        waiting = Running(lambda: values(old))
        it.waits.wait_for_waiter()
        new = iter(batches)  # at once, though the other one waits
        following = Running(lambda: values(new))
        it.rows(*[1] * 20)
        it.end_epoch(0)
        assert waiting.result() == []
        assert following.result() == [[row] for row in range(6)]
        assert flat(batches) == list(range(6, 12))


@pytest.mark.parametrize(
    ("shuffle", "says"),
    [(-1, "rows"), ("global", r"cluster.feed\(…, shuffle=.global.\)"), ("all", "rows")],
)
def test_shuffle_of_another_kind_is_refused(shuffle: Any, says: str) -> None:
    with Arrivals() as it, pytest.raises(ConfigError, match=rf"shuffle={shuffle!r} must .*{says}"):
        EpochBatches(it.reader, 1, shuffle=shuffle)


COLUMNS = {"a": 1, "b": 2, "c": 3}
WEIGHTED = {**COLUMNS, "sample_weight": 0}


@pytest.mark.parametrize(
    ("columns", "x", "y", "element"),
    [
        (COLUMNS, None, None, COLUMNS),
        (COLUMNS, "a", None, 1),
        (COLUMNS, "a", "c", (1, 3)),
        (COLUMNS, ["a", "b"], "c", ({"a": 1, "b": 2}, 3)),
        (COLUMNS, "a", ["b", "c"], (1, {"b": 2, "c": 3})),
        (WEIGHTED, None, None, WEIGHTED),
        (WEIGHTED, "a", None, (1, 0)),
        (WEIGHTED, "a", "b", (1, 2, 0)),
        (WEIGHTED, ["a", "sample_weight"], "b", ({"a": 1, "sample_weight": 0}, 2)),
    ],
)
def test_named_element(
    columns: dict[str, Any], x: Names | None, y: Names | None, element: Any
) -> None:
    assert arrange(columns, x, y) == element


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 4), st.sampled_from(["short", "pad"]))
def test_slices_make_up_global_batches_and_their_weights_a_mean_over_all_rows(
    total: int, more: int, nodes: int, tail: Tail
) -> None:
    size = nodes + more
    whole, rest = divmod(total, size)
    rows = [whole * Slice(size, i, nodes).size + Slice(rest, i, nodes).size for i in range(nodes)]
    if min(rows) == 0:
        return  # an error, as without slices
    steps: list[list[tuple[int, float]]] = []
    for node in range(nodes):
        with Arrivals() as it:
            it.rows(*[1] * rows[node])
            it.end_epoch(0, dict(enumerate(rows)))
            slices = Slices(size, tuple(range(nodes)), node)
            found = list(EpochBatches(it.reader, 1, tail=tail, slices=slices))
            assert it.consumed[0] == rows[node]
        assert tail == "short" or {len(b["x"]) for b in found} == {Slice(size, 0, nodes).size}
        weights = [batch["sample_weight"] for batch in found]
        assert not any(each.flags.writeable for each in weights), "batches may share them"
        steps.append([((w > 0).sum(), w.mean(dtype=float) / nodes) for w in weights])
    by_step = [*zip(*steps, strict=True)]
    assert [sum(n for n, _ in step) for step in by_step] == [size] * whole + [rest] * (rest > 0)
    assert [sum(w for _, w in step) for step in by_step] == pytest.approx([1] * len(by_step))


def test_rows_that_not_all_nodes_have_got_are_in_no_global_batch() -> None:
    slices = Slices(5, (7, 3), 1)
    assert slices.total({7: 7, 3: 5}) == 12
    assert slices.total({7: 9, 3: 5}) == slices.total({7: 8, 3: 4}) == 10
    assert slices.total({7: 9}) == 0
