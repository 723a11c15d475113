"""A position among segments is what a list of rows says, however it is moved, pressed or cut."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs

from sparkdl.control.counts import Given
from sparkdl.control.messages import EpochEnd
from sparkdl.feed.reader.cursor import HEAD_STEPS, ReaderCursor
from tests.doubles.feeds import FEED, item, numbers


@dataclass
class Piece:
    """A segment: its number, and the rows that are left in it."""

    number: int
    rows: list[int]


@dataclass
class Pass:
    """Segments that crossed once.

    Attributes:
        first: the epoch that they came in.
        marks: of the epochs that read them, whether the next one reads them again.
    """

    first: int
    pieces: list[Piece] = field(default_factory=list)
    marks: list[bool] = field(default_factory=list)


class Moves:
    """A cursor, and what it should say: an agent and user code move it where they may."""

    def __init__(self) -> None:
        self.cursor = ReaderCursor()
        self.passes = [Pass(0)]
        self.released: set[int] = set()
        self.row = self.number = self.epoch = self.abandoned = 0
        self.counts = self.floor_counts = Given()
        self.taken = self.given = self.floor = self.lost = 0
        """Segments: taken, given whole, given whole before the floor, and no more here."""
        self.given_rows: list[int] = []
        self.floor_rows: list[int] = []

    @property
    def read(self) -> Pass:
        """The pass of the epoch that is read."""
        return next(each for each in reversed(self.passes) if each.first <= self.epoch)

    @property
    def mark(self) -> bool | None:
        """The mark of the epoch that is read, if it is there."""
        number = self.epoch - self.read.first
        return self.read.marks[number] if number < len(self.read.marks) else None

    @property
    def offset(self) -> int:
        """Rows of the next segment that were given for good."""
        whole = sum(len(piece.rows) for piece in self.read.pieces[: self.floor])
        return len(self.floor_rows) - whole if self.taken == self.floor else 0

    @property
    def left(self) -> list[int]:
        """Rows that were taken and not given."""
        taken = [row for piece in self.read.pieces[: self.taken] for row in piece.rows]
        return taken[len(self.given_rows) :]

    def note(self, numbers: list[int]) -> None:
        """Take what the cursor releases: each segment once."""
        assert len(set(numbers)) == len(numbers)
        assert self.released.isdisjoint(numbers)
        self.released.update(numbers)

    def raise_floor(self) -> None:
        self.floor, self.floor_rows = self.given, list(self.given_rows)
        self.floor_counts = self.counts

    # What arrives.

    def arrives(self, count: int, _: bool) -> None:
        last = self.passes[-1]
        if not last.marks:
            rows = list(range(self.row, self.row + count))
            last.pieces.append(Piece(self.number, rows))
            self.cursor.add(item(numbers(rows[0], rows[-1] + 1), self.number, last.first))
            self.row, self.number = self.row + count, self.number + 1

    def ends(self, _: int, again: bool) -> None:
        last = self.passes[-1]
        epoch = last.first + len(last.marks)
        last.marks.append(again and self.released.isdisjoint(p.number for p in last.pieces))
        self.note(self.cursor.add_mark(EpochEnd(FEED, epoch, {}, last.marks[-1])))
        if not last.marks[-1]:
            self.passes.append(Pass(epoch + 1))

    def is_pressed(self, _: int, is_waiting: bool) -> None:
        """Release what was given; and what was taken, if user code gathers more."""
        found = self.cursor.releasable(is_waiting)
        self.note(found)
        if self.epoch != self.read.first or self.mark:
            assert found == [], "a later epoch reads it again"
            return
        ends = self.read.pieces[: self.taken if is_waiting else self.given]
        assert self.released >= {piece.number for piece in ends}
        assert {piece.number for piece in ends} >= set(found)
        steps = self.counts.steps - self.floor_counts.steps
        self.lost = max(self.lost, self.given if steps > HEAD_STEPS else self.floor)

    # What user code does.

    def takes(self, _: int, __: bool) -> None:
        if self.taken < len(self.read.pieces):
            piece, offset = self.read.pieces[self.taken], self.offset
            found = self.cursor.take()
            assert (found.segment.number, found.skip) == (piece.number, offset)
            assert found.batch()["x"].to_pylist() == piece.rows
            self.taken += 1

    def gives(self, most: int, for_good: bool) -> None:
        if rows := self.left[:most]:
            self.cursor.give(len(rows), most - len(rows), 1, for_good)
            self.given_rows += rows
            was = self.counts
            padded = was.padded + most - len(rows)
            self.counts = structs.replace(
                was, rows=was.rows + len(rows), steps=was.steps + 1, padded=padded
            )
            held = self.read.pieces[: self.taken]
            ends = [sum(len(piece.rows) for piece in held[: n + 1]) for n in range(len(held))]
            self.given = sum(end <= len(self.given_rows) for end in ends)
            if for_good:
                self.raise_floor()

    def claims(self, _: int, __: bool) -> None:
        """Abandon the iteration, and begin another one at the floor, or behind what is lost."""
        if self.lost > self.floor:
            self.cursor.raise_floor()
            self.raise_floor()
        again = self.counts.rows - self.floor_counts.rows
        self.abandoned += again > 0
        self.cursor.rewind()
        assert not self.cursor.is_gone
        self.taken = self.given = self.floor
        self.given_rows = list(self.floor_rows)
        self.counts = structs.replace(self.floor_counts, again=self.counts.again + again)

    def finishes(self, _: int, __: bool) -> None:
        if self.mark is not None and self.taken == len(self.read.pieces):
            mine, again = {piece.number for piece in self.read.pieces}, self.mark
            found = self.cursor.finish_epoch()
            assert set(found) == (set() if again else mine - self.released)
            self.note(found)
            self.epoch += 1
            self.taken, self.given, self.given_rows, self.abandoned = 0, 0, [], 0
            self.lost = self.lost if again else 0
            self.raise_floor()

    def look(self) -> None:
        cursor, pieces = self.cursor, self.read.pieces
        assert (cursor.epoch, cursor.counts) == (self.epoch, self.counts)
        assert cursor.abandoned == self.abandoned
        assert cursor.is_begun == (self.taken > 0 or bool(self.given_rows))
        assert (cursor.mark and cursor.mark.again) == self.mark
        due = cursor.next_item
        assert (due and due.segment.number) == (
            pieces[self.taken].number if self.taken < len(pieces) else None
        )


MOVES = st.sampled_from(
    [
        *(Moves.arrives, Moves.takes, Moves.gives, Moves.gives, Moves.ends, Moves.finishes),
        *(Moves.claims, Moves.is_pressed),
    ]
)


def in_steps(count: int) -> list[tuple[Any, int, bool]]:
    """Give so many segments of a row each, release them, and begin anew."""
    step = [(Moves.arrives, 1, False), (Moves.takes, 1, False), (Moves.gives, 1, False)]
    return [*step * count, (Moves.is_pressed, 1, False), (Moves.claims, 1, False)]


@given(st.lists(st.tuples(MOVES, st.integers(1, 9), st.booleans()), min_size=60, max_size=90))
@example(in_steps(HEAD_STEPS))
@example(in_steps(HEAD_STEPS + 1))
def test_cursor_is_where_a_list_of_rows_says(moves: list[tuple[Any, int, bool]]) -> None:
    it = Moves()
    for move, number, flag in [*moves, (Moves.ends, 1, False)]:
        move(it, number, flag)
        it.look()
    while it.epoch < it.passes[-1].first:
        for move in (Moves.takes, Moves.gives, Moves.finishes):
            move(it, 9, False)
            it.look()
    assert it.released == set(range(it.number)), "nothing of what arrived is left"
    it.cursor.clear()


def test_item_is_a_window_of_its_file() -> None:
    one = item(numbers(0, 9), 0)
    one.segment = structs.replace(one.segment, start=3, rows=4)
    assert one.batch().column("x").to_pylist() == [3, 4, 5, 6]
    one.close()
