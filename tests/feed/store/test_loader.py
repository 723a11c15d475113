"""Files that an agent reads: of one generation, for as long as they are wanted."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
from hypothesis import given, strategies as st

from sparkdl.control.messages import FeedBegin, FeedCut, ReadShare
from sparkdl.control.rows import FeedCount, Share
from sparkdl.core.row_ranges import Slice, Sliced
from sparkdl.feed.reader.batches import EpochBatches
from sparkdl.feed.store.spool import by_slices
from sparkdl.storage.parquet.source import list_files
from tests.doubles.feeds import FEED, FILE_ROWS as ROWS, LevelDriver, LocalNode, folder as folder
from tests.doubles.until import until

LITTLE = 1 << 16


def share_of(folder: Path) -> Share:
    return list_files(str(folder)).shares(1)[0]


def read(node: LocalNode, share: Share, epoch: int = 0, last: int = 0) -> None:
    """Do what the driver does to begin a pass, and to assign what it brings."""
    LevelDriver([node])
    order = ReadShare(FEED, epoch, share, "run", epoch < last)
    node.call(lambda: node.feeds.on_driver_message(FeedBegin(FEED, epoch, last)))
    node.call(lambda: node.feeds.on_driver_message(order))


def cut(node: LocalNode, epoch: int = 0, is_short: bool = False) -> None:
    """Do what the driver does to have the rows of a pass counted."""
    node.call(lambda: node.feeds.on_driver_message(FeedCut(FEED, epoch, is_short)))


def wait_for(node: LocalNode, is_it: Callable[[FeedCount], bool]) -> FeedCount:
    """Wait until the coordinator was told what is asked of the feed; return it."""
    found: list[FeedCount] = []

    def look(told: object) -> bool:
        found[:] = [c for each in node.told for c in each.counts if c.feed == FEED and is_it(c)]
        return bool(found)

    node.wait_told(look)
    return found[-1]


def test_reading_that_waits_for_room_ends_when_the_epoch_is_cut(folder: Path) -> None:
    with LocalNode(limit_nbytes=LITTLE) as node:
        read(node, share_of(folder))
        wait_for(node, lambda c: c.rows_received > 0)
        cut(node, is_short=True)
        count = wait_for(node, lambda c: c.cut.epoch == 0)
        assert 0 < count.rows_received < ROWS
        assert count.problem == ""


SPANS = st.lists(st.tuples(st.integers(0, 90), st.integers(1, 90)), min_size=1, max_size=4)


@given(SPANS, st.integers(1, 40), st.integers(1, 5))
def test_columns_of_any_type_are_put_together_by_slices(
    found: list[tuple[int, int]], size: int, nodes: int
) -> None:
    spans = tuple((0, start, start + rows) for start, rows in found)
    numbers = [n for _, *rows in spans for n in range(*rows)]
    texts, halves = [*map(str, numbers)], [n if n % 2 else None for n in numbers]
    flags = [n % 3 == 0 for n in numbers]
    types = [pa.int16(), pa.float32(), pa.string(), pa.int64(), pa.bool_()]
    columns = [pa.array([0] * 3 + numbers, types[0])[3:], numbers, texts, halves, flags]
    batch = pa.record_batch([*map(pa.array, columns, types)], [*"abcde"])
    rows = Sliced(spans, Slice.all(size, nodes))
    places = [at + i for at, (_, first, to) in rows.placed() for i in range(to - first)]
    dealt = by_slices(batch, rows)
    assert dealt.equals(batch.take(pa.array(places, pa.int64())))
    is_of_one = len(spans) == 1 and numbers[0] // size == numbers[-1] // size
    assert dealt is batch or not is_of_one, "rows of one global batch need no copy"


def test_rows_of_each_slice_of_global_batches_are_put_together(folder: Path) -> None:
    with LocalNode() as node:
        node.driver = None
        order = ReadShare(FEED, 0, share_of(folder), "run", slices=(10, 2))
        node.call(lambda: node.feeds.on_driver_message(order))
        spool = node.feeds.store.spool(FEED)
        assert until(lambda: spool._segments)
        segment = spool._segments[0].segment
        window = segment.window(0, segment.rows, segment.fd)
        (rows,) = spool.read([(0, 0, segment.rows)])
        assert rows["x"].to_pylist() == [n for _, *rows in window.spans for n in range(*rows)]
        (told,) = [each for report in node.spooled for each in report.ranges if each.rows]
        assert (told.start, told.rows, told.batch_rows) == (0, segment.rows, 10)
        assert [rows["x"][place].as_py() for place in told.skips] == [0, 5]
        # What a node had of one slice before a restart is a range for each batch.
        second = Sliced(((0, 0, 20),), (Slice(10, 1, 2),))
        again = spool._ranges(replace(segment, rows=10, spans=second, fd=os.dup(segment.fd)))
        assert [(each.start, each.rows, each.skip) for each in again] == [(5, 5, 0), (15, 5, 5)]


def test_rows_of_an_old_reading_do_not_reach_the_next_child(folder: Path) -> None:
    with LocalNode(limit_nbytes=LITTLE) as node:
        read(node, share_of(folder))
        wait_for(node, lambda c: c.rows_received > 0)
        node.call(lambda: node.feeds.close("the child has died"))
        node.call(lambda: node.feeds.reopen(1))
        told = len(node.told)
        read(node, list_files(str(folder / "1.parquet")).shares(1)[0])
        batches = iter(EpochBatches(node.reader(), 1))
        while (first := int(next(batches)["x"][0])) < ROWS // 2:
            pass  # what the child had been sent before
        assert first == ROWS // 2
        assert all(not c.problem for each in node.told[told:] for c in each.counts)
