"""A position is exactly the rows of the batches that were handed out so far, however they were."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, strategies as st

from sparkdl.control.channel import Local, Reclaim, Reopened
from sparkdl.control.messages import FeedCovered
from sparkdl.control.rows import EpochRows
from sparkdl.core.errors import ConfigError
from sparkdl.datasets.tfos import DataFeed
from sparkdl.feed.reader import consumed as used
from sparkdl.feed.reader.batches import EpochBatches, Tail
from sparkdl.feed.reader.consumed import ConsumedRows
from sparkdl.feed.reader.cursor import HEAD_STEPS
from tests.doubles.feeds import FEED, Arrivals

Row = tuple[int, int]
"""An epoch, and a row's number: the column "x"."""


class Numbered(Arrivals):
    def __init__(self) -> None:
        super().__init__(timeout_s=5.0, tracks=True)
        self.first: list[int] = []

    def batch(
        self, batch: pa.RecordBatch, epoch: int = 0, exchange: str = "", is_last: bool = False
    ) -> None:
        self.first.append(batch.column("x")[0].as_py())
        super().batch(batch, epoch, exchange, is_last)

    def position(self, batches: int | None) -> list[Row]:
        """Return the rows of a position; each is in it once."""
        return self.rows_of(self.reader.position(batches))

    def rows_of(self, rows: EpochRows) -> list[Row]:
        return sorted(
            (epoch, self.first[segment] + row)
            for epoch, segments in rows.items()
            for segment, ranges in segments.items()
            for start, stop in ranges
            for row in range(start, stop)
        )


@dataclass(frozen=True)
class Epoch:
    """Segments that cross once and are read so often, each time abandoned first after so many."""

    segments: tuple[int, ...]
    times: int
    abandoned: tuple[int, ...]


@dataclass
class Book:
    """What a test has seen in its batches.

    Attributes:
        batches: the rows of each.
        dropped: rows that were dropped behind so many batches.
    """

    batches: list[list[Row]] = field(default_factory=list)
    dropped: list[tuple[int, Row]] = field(default_factory=list)

    def read(self, batches: Iterator[list[int]], epoch: int, rows: list[int], tail: Tail) -> None:
        left = sorted((epoch, row) for row in rows)
        for batch in batches:
            found: list[Row] = []
            for row in batch:
                found.append((epoch, row))
                left.remove(found[-1])
            self.batches.append(found)
        self.dropped += [(len(self.batches), row) for row in left]

    def used(self, batches: int) -> list[Row]:
        rows = [row for batch in self.batches[:batches] for row in batch]
        return sorted(rows + [row for at, row in self.dropped if at <= batches])


epochs = st.builds(
    Epoch,
    st.lists(st.integers(1, 12), max_size=4).map(tuple),
    st.integers(1, 3),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
)


def own_rows(batch: dict[str, np.ndarray]) -> list[int]:
    rows: list[int] = batch["x"].tolist()
    weights = batch.get("sample_weight")
    return rows if weights is None else rows[: int(weights.sum())]


@pytest.mark.parametrize("tail", ["short", "pad", "drop"])
@given(
    passes=st.lists(epochs, min_size=1, max_size=3),
    size=st.sampled_from([1, 3, 7, 20]),
    shuffle=st.sampled_from([False, True, 1, 10]),
    is_even=st.booleans(),
    is_pressed=st.booleans(),
)
def test_position_is_the_rows_of_the_batches(
    tail: Tail, passes: list[Epoch], size: int, shuffle: bool | int, is_even: bool, is_pressed: bool
) -> None:
    book, number, row = Book(), 0, 0
    with Numbered() as it:
        batches = EpochBatches(it.reader, size, None, is_even, tail, shuffle)
        for each in passes:
            count = sum(each.segments)
            rows = list(range(row, row + count))
            if is_even and not count and tail in ("short", "pad"):
                continue
            it.rows(*each.segments, epoch=number)
            row += count
            for time in range(each.times):
                it.end_epoch(number, {0: count}, again=time + 1 < each.times)
                for taken in each.abandoned:
                    for _ in zip(range(min(taken, count // size)), batches, strict=False):
                        pass
                if is_pressed and time + 1 == each.times:
                    it.reader.on_message(Reclaim(FEED))
                book.read(map(own_rows, batches), number, rows, tail)
                assert it.reader.batches_given == len(book.batches)
                for n in range(len(book.batches) + 1):
                    assert it.position(n) == book.used(n)
                assert it.position(None) == book.used(len(book.batches))
                number += 1
        everything = {row for batch in book.batches for row in batch}
        assert set(it.position(None)) >= everything


@given(
    segments=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    size=st.integers(1, 8),
    taken=st.integers(0, 30),
)
def test_batches_of_abandoned_loops_are_unused(segments: list[int], size: int, taken: int) -> None:
    with Numbered() as it:
        it.rows(*segments)
        it.end_epoch(0)
        batches = EpochBatches(it.reader, size)
        for _ in zip(range(min(taken, sum(segments) // size)), batches, strict=False):
            it.reader.on_message(Reclaim(FEED))
        again = iter(batches)
        assert it.position(None) == []
        try:
            seen = list(map(own_rows, again))
        except ConfigError:  # the first rows are gone
            assert taken > HEAD_STEPS
            assert it.position(None) == []
            return
        for n in range(len(seen) + 1):
            assert it.position(n) == [(0, row) for batch in seen[:n] for row in batch]
        assert it.position(None) == [(0, row) for row in range(sum(segments))]


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=8),
    st.lists(st.integers(1, 7), max_size=12),
)
def test_datafeed_counts_lists_not_inference(
    segments: list[tuple[bool, int]], sizes: list[int]
) -> None:
    def send(_message: Local, _fd: int) -> None: ...

    with Numbered() as it:
        row = asked = 0
        for is_asked, count in segments:
            if is_asked:
                columns = {"x": np.arange(-asked - count, -asked)}
                it.batch(pa.record_batch(columns), exchange="e")
                asked += count
            else:
                it.rows(count)
                row += count
        it.end_epoch(0)
        it.end()
        feed = DataFeed(it.reader, send, train_mode=True)
        seen: list[list[int]] = []
        for size in sizes:
            batch = [each[0] if isinstance(each, tuple) else each for each in feed.next_batch(size)]
            if fed := [int(value) for value in batch if int(value) >= 0]:
                seen.append(fed)
        for n in range(len(seen) + 1):
            assert it.position(n) == [(0, r) for batch in seen[:n] for r in batch]
        with pytest.raises(ConfigError, match=f"={len(seen) + 1}: must be .* to {len(seen)}"):
            it.position(len(seen) + 1)


def test_terminate_drops_what_is_here_and_takes_nothing_back() -> None:
    with Numbered() as it:
        it.rows(4, 4)
        reading = iter(EpochBatches(it.reader, 3))
        for _ in range(2):
            next(reading)
        it.reader.terminate()
        it.reader.on_message(Reopened(FEED, 1))
        it.rows(5, epoch=1)
        it.end_epoch(1)
        assert len(list(EpochBatches(it.reader, 3))) == 2
        assert it.position(2) == [(0, row) for row in range(6)]
        assert it.position(None) == [(0, r) for r in range(6)] + [(1, r) for r in range(8, 13)]


def test_rows_that_only_fill_a_step_are_no_rows_of_a_position() -> None:
    with Numbered() as it:
        it.rows(2)
        it.end_epoch(0, {0: 2, 1: 9})
        batches = iter(EpochBatches(it.reader, 2, is_even=True))
        assert len(list(batches)) == 5
        assert [it.position(n) for n in (1, 2, 5)] == [[(0, 0)], *[[(0, 0), (0, 1)]] * 2]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=60),
    st.booleans(),
    st.integers(0, 60),
)
@example([(2, False)] * 14 + [(2, True)], False, 0)
def test_what_is_folded_is_still_known(
    steps: list[tuple[int, bool]], is_mixed: bool, committed: int
) -> None:
    """With little memory, the batches beyond the latest are known together."""
    seen: list[list[int]] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("MAX_BATCHES", 4), ("MAX_POSITIONS", 16), ("_MIN_BATCHES", 2)):
            patch.setattr(used, name, value)
        rows = ConsumedRows(is_wanted=True)
        place, at_floor = 0, 0
        for number, (count, gives_back) in enumerate(steps):
            segment = rows.append_segment(0, number, count + 1)
            assert segment == place
            part = np.arange(place, place + count)[::-1] if is_mixed else (place, place + count)
            rows.add([part] if count else [])
            seen.append(list(range(place, place + count)))
            place += count + 1
            if number == committed:
                rows.commit()
                at_floor = len(seen)
            elif gives_back and number % 7 == 0:
                rows.rewind()
                del seen[at_floor:]
            assert rows.count == len(seen)
            least = rows.count - len(rows._latest)
            assert len(rows._latest) <= 9
            for n in (least, rows.count):
                assert _places(rows, n) == [each for batch in seen[:n] for each in batch]
        if least := rows.count - len(rows._latest):
            with pytest.raises(ConfigError, match="reduce how far"):
                rows.position(least - 1)


def _places(rows: ConsumedRows, batches: int) -> list[int]:
    return [
        rows._starts[segment] + row
        for segments in rows.position(batches).values()
        for segment, ranges in segments.items()
        for start, stop in ranges
        for row in range(start, stop)
    ]


def test_epochs_that_need_not_be_told_any_more_are_forgotten() -> None:
    with Numbered() as it:
        batches = EpochBatches(it.reader, 4)
        for epoch in range(4):
            it.rows(5, 5, epoch=epoch)
            it.end_epoch(epoch, {0: 10})
            assert len(list(batches)) == 3
            it.reader.on_message(FeedCovered(FEED, epoch - 1))
        told = [row for row in it.position(None) if row[0] >= 2]
        assert told == [(n, row) for n in (2, 3) for row in range(n * 10, n * 10 + 10)]
        assert len(it.reader._cursor.consumed._segments) == 4


def test_epoch_that_the_training_has_read_to_its_end_is_not_read_ahead() -> None:
    with Numbered() as it:
        for epoch in range(2):
            it.rows(4, epoch=epoch)
            it.end_epoch(epoch)
        batches = EpochBatches(it.reader, 2)
        for epoch in range(2):
            reading = iter(batches)
            for _ in range(2):
                it.reader.read_ahead(None)
                next(reading)
            it.reader.reach_end()  # of another iteration: this one has not ended
            with pytest.raises(ConfigError, match=r"Pass batches="):
                it.position(None)
            assert next(reading, None) is None
            with pytest.raises(ConfigError, match=r"Pass batches="):
                it.position(None)
            it.reader.reach_end()
            assert len(it.position(None)) == 4 * (epoch + 1)


def test_feed_beside_the_counted_one_counts_whole_epochs(caplog: pytest.LogCaptureFixture) -> None:
    with Numbered() as it:
        for epoch in range(2):
            it.rows(4, epoch=epoch)
            it.end_epoch(epoch)
        batches = EpochBatches(it.reader, 2)
        for _ in batches:
            it.reader.read_ahead(None)
        assert it.reader.batches_beside() == 2
        next(iter(batches))
        assert not caplog.messages
        assert [it.reader.batches_beside() for _ in range(2)] == [2, 2]
        assert [text for text in caplog.messages if "begins again after a restart" in text]


@pytest.mark.jax
def test_position_of_a_feed_that_nobody_notes_is_an_error() -> None:
    with Arrivals() as it, pytest.raises(ConfigError, match="launch with checkpoint_dir"):
        it.reader.position(0)
