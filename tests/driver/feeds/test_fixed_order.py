"""A global batch has the same rows in any order of arrival, on any number of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from random import Random

from hypothesis import given, strategies as st
from msgspec import structs

from sparkdl.control.messages import SpooledRange
from sparkdl.core.row_ranges import Slice, Sliced, merge_ranges
from sparkdl.driver.feeds.fixed_order import OrderedTable
from tests.driver.feeds.test_table import ROOM_NBYTES, SHORT, piece, rows_of

Rows = list[tuple[int, int]]
FULL = 1 << 40
SIZES = st.lists(st.integers(0, 60), min_size=1, max_size=6)


def spooled(
    random: Random, sizes: list[int], nodes: int, batch: int, together: bool
) -> tuple[list[SpooledRange], list[Rows]]:
    """Return the ranges of segments, and the rows of each: `together` by the slices of batches."""
    pieces, segments = list[SpooledRange](), list[Rows]()
    for part, rows in enumerate(sizes):
        start = 0
        while start < rows:
            some = min(rows - start, 1 + random.randrange(3 * batch if together else 20))
            pieces.append(piece(len(segments), start, some, part))
            spans = [(part, start, start + some)]
            if together:
                (skips,) = (sliced := Sliced(tuple(spans), Slice.all(batch, nodes))).starts
                pieces[-1] = structs.replace(pieces[-1], batch_rows=batch, skips=skips)
                spans = [*sliced]
            segments.append([(part, row) for _, *ends in spans for row in range(*ends)])
            start += some
        pieces.append(SpooledRange(-1, part, rows, 0, 0))
    return pieces, segments


def sequence(
    random: Random,
    sizes: list[int],
    nodes: int,
    batch: int,
    done: Sequence[tuple[int, int]] = (),
    key: str = "",
    together: bool = False,
) -> Rows:
    """Return the rows of an epoch in the order of the global batches, dealt as they come."""
    covered = {
        part: tuple(merge_ranges((i, i + 1) for p, i in done if p == part)) for part, _ in done
    }
    table = OrderedTable(range(nodes), batch, {}, covered, Random(key) if key else None)
    # Slices may be those of a world with other nodes, too.
    pieces, segments = spooled(random, sizes, random.choice((nodes, 3)), batch, together)
    got = {node: list[tuple[int, int]]() for node in range(nodes)}
    random.shuffle(pieces)

    def deal(*unread: int) -> None:
        assigned = table.assign({node: random.choice(unread) for node in range(nodes)}, 0.0)
        for node, ranges in assigned.items():
            got[node] += rows_of(ranges)
            there = [segments[r.number][r.skip : r.skip + r.rows] for r in ranges]
            assert [*chain(*there)] == rows_of(ranges)

    for each in pieces:
        table.add(random.randrange(nodes), [each], ROOM_NBYTES, 0.0)
        # What comes again is refused, where it lies.
        for unwanted in table.add(0, [each], ROOM_NBYTES, 0.0) if each.rows else ():
            there = segments[unwanted.number][unwanted.skip : unwanted.skip + unwanted.rows]
            assert there == [(unwanted.partition, unwanted.start + i) for i in range(unwanted.rows)]
        if random.random() < 0.5:
            deal(SHORT, FULL)
    while not table.is_complete(dict(enumerate(sizes))):
        deal(SHORT)
    assert not table.withdraw()
    left, found = {node: iter(rows) for node, rows in got.items()}, []
    total = sum(map(len, got.values()))
    for first in range(0, total, batch):
        many = min(batch, total - first)
        for node in range(nodes):
            found += [next(left[node]) for _ in range(Slice(many, node, nodes).size)]
    assert len(found) == total
    return found


@given(
    st.integers(0, 1 << 32),
    SIZES,
    st.integers(1, 5),
    st.integers(5, 40),
    st.sampled_from(["", "1/0"]),
    st.booleans(),
)
def test_order_depends_on_the_data_alone(
    seed: int, sizes: list[int], nodes: int, batch: int, key: str, together: bool
) -> None:
    every = [(part, row) for part, rows in enumerate(sizes) for row in range(rows)]
    alone = sequence(Random(0), sizes, 1, batch, key=key)
    assert sequence(Random(seed), sizes, nodes, batch, key=key, together=together) == alone
    assert sorted(alone) == every
    if not key:
        assert alone == every
    elif len(every) > 20:
        assert alone != every
        assert sequence(Random(0), sizes, 1, batch, key="1/1") != alone, "another epoch"
    done = alone[: batch * (seed % (1 + len(alone) // batch))]
    assert sequence(Random(seed), sizes, nodes, batch, done, key, together) == alone[len(done) :]


def test_batch_is_whole_though_its_rows_came_while_nodes_had_no_room() -> None:
    table = OrderedTable([0, 1], 4, {}, {})
    table.add(0, [piece(0, 0, 6)], ROOM_NBYTES, 0.0)
    assert table.assign({0: SHORT, 1: FULL}, 0.0) == {}
    table.add(0, [piece(1, 6, 5)], ROOM_NBYTES, 0.0)
    assert not table.is_complete({0: 11})
    assert {n: rows_of(some) for n, some in table.assign({0: SHORT, 1: SHORT}, 0.0).items()} == {
        0: [(0, row) for row in (0, 1, 4, 5, 8, 9)],
        1: [(0, row) for row in (2, 3, 6, 7, 10)],
    }


def test_first_batches_are_dealt_before_other_partitions_have_come() -> None:
    table = OrderedTable([0, 1], 4, {}, {})
    table.add(0, [piece(0, 0, 10, partition=1)], ROOM_NBYTES, 0.0)
    assert table.assign({0: SHORT, 1: SHORT}, 0.0) == {}, "partition 0 comes first"
    table.add(1, [piece(0, 0, 5, partition=0)], ROOM_NBYTES, 0.0)
    assert {n: rows_of(some) for n, some in table.assign({0: SHORT, 1: SHORT}, 0.0).items()} == {
        0: [(0, 0), (0, 1)],
        1: [(0, 2), (0, 3)],
    }
    table.add(1, [SpooledRange(-1, 0, 5, 0, 0)], ROOM_NBYTES, 0.0)
    assert rows_of(table.assign({0: SHORT, 1: SHORT}, 0.0)[0]) == [(0, 4), (1, 0), (1, 3), (1, 4)]
    left = [*chain(*table.withdraw().values())]
    assert [(each.partition, each.start, each.rows) for each in left] == [(1, 7, 3)]
