"""The rows of an epoch in a fixed order, dealt to the nodes in global batches. Pure.

    order     partition 0: 0 1 2 3 4 5 6   partition 1: 0 1 2 …    or blocks of these, shuffled
    batches   ├─────── 0 ───────┤├──────── 1 ──────────…
    slices    ├ node 0 ┤├ node 1┤├ node 0 ┤├ node 1 …

The order depends on the data, and on the call and the epoch if it is shuffled: not on the nodes,
nor on when rows come. Rows that a checkpoint covers are left out: whole batches, so that the
batches after them stay as they are.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from random import Random
from typing import Any

from sparkdl.control.messages import AssignedRange, SpooledRange
from sparkdl.control.rows import PartRows
from sparkdl.core.row_ranges import Range, Slice, Sliced, Span, add_range, merge_ranges, uncovered
from sparkdl.driver.feeds.table import Assigned, RowTable, part, windows

BATCH_BLOCKS = 16
"""Rows are shuffled in blocks of consecutive rows, so many of which make a batch."""
_MAX_BATCHES, _MAX_AHEAD = 128, 8192
"""The most that are dealt in one step, so that others have their turn, and in advance."""
_WORD = (1 << 64) - 1


def permutation(size: int, random: Random) -> Iterator[int]:
    """Yield the numbers below `size` in an order that `random` gives; none of them is stored.

    A Feistel network of four rounds permutes the numbers of an even number of bits; those that are
    too large are permuted again (Black and Rogaway: Ciphers with Arbitrary Finite Domains, 2002).
    """
    bits = (size.bit_length() + 1) // 2
    mask, keys = (1 << bits) - 1, [random.getrandbits(64) | 1 for _ in range(4)]
    for number in range(size):
        while True:
            left, right = number >> bits, number & mask
            for key in keys:
                mixed = (right + key) * key & _WORD
                left, right = right, left ^ (mixed ^ mixed >> 32) * key >> 40 & mask
            number = left << bits | right
            if number < size:
                break
        yield number


class OrderedTable(RowTable):
    """The rows of one epoch, see `RowTable`.

    Args:
        nodes: by rank; slice i of each batch is that of node i.
        batch_rows: of a global batch; only the last one has fewer.
        ends: how many rows partitions have, where that is known.
        random: shuffles the rows, once all have come.
    """

    def __init__(
        self,
        nodes: Sequence[int],
        batch_rows: int,
        ends: Mapping[int, int],
        done: PartRows,
        random: Random | None = None,
    ) -> None:
        super().__init__({}, done)
        self._nodes, self._batch_rows = tuple(nodes), batch_rows
        self._ends.update(ends)
        self._are_all_here = False
        self._is_shuffled = random is not None
        self._done = {number: merge_ranges(ranges) for number, ranges in done.items()}
        self._pieces: dict[int, list[tuple[int, int, SpooledRange]]] = {}
        self._dealt: dict[int, list[Range]] = {}
        self._sequence = self._data_order() if random is None else self._blocks(random)
        self._next: deque[Span] = deque()
        self._next_rows = 0

    def _enter(self, holder: int, piece: SpooledRange, now_s: float) -> None:
        pieces = self._pieces.setdefault(piece.partition, [])
        insort(pieces, (piece.start, holder, piece), key=itemgetter(0))

    def add(self, *args: Any, is_full: bool = False) -> list[SpooledRange]:
        self.is_stuck |= is_full and self._is_shuffled and not self._are_all_here
        return [each for unwanted in super().add(*args) for each in _apart(unwanted)]

    def is_complete(self, num_rows: Mapping[int, int]) -> bool:
        """Return whether all rows have come, and are assigned."""
        if not super().is_complete(num_rows):
            return False
        self._ends.update(num_rows)
        self._are_all_here = True
        return not self.rows_waiting

    def assign(self, unread: Mapping[int, int], now_s: float) -> Assigned:
        self.due_s = math.inf
        # Slices are even, whoever is slow, so a limit only bounds the ranges that wait at agents.
        many = _MAX_AHEAD * self._batch_rows // len(self._nodes)
        rooms = {n: max(many, self._window(n)) for n in unread} if self.has_rows else {}
        # As in `RowTable`: no node has run down to half of its window.
        if not any(2 * unread[node] < room for node, room in rooms.items()):
            return {}
        dealt: dict[int, list[AssignedRange]] = {node: [] for node in self._nodes}
        before = self.assigned.copy()
        for _ in range(_MAX_BATCHES):
            rows = self._reach()
            is_whole = rows == self._batch_rows or (self._are_all_here and rows > 0)
            has_room = all(unread[n] + self.assigned[n] - before[n] < rooms[n] for n in rooms)
            if not (is_whole and has_room):
                break
            if self._take_batches(dealt):
                continue
            for i, node in enumerate(self._nodes):
                dealt[node] += self._take_slice(node, Slice(rows, i, len(self._nodes)).size)
        else:
            self.due_s = now_s
        return {node: [*windows(ranges)] for node, ranges in dealt.items() if ranges}

    def assign_rest(self, nodes: Sequence[int]) -> Assigned:
        return {}

    def withdraw(self) -> dict[int, list[SpooledRange]]:
        left: dict[int, list[SpooledRange]] = {}
        for number, pieces in self._pieces.items():
            dealt = self._dealt.setdefault(number, [])
            for start, holder, piece in pieces:
                for rows in add_range(dealt, start, start + piece.rows):
                    left.setdefault(holder, []).extend(_apart(part(piece, *rows)))
        self._pieces.clear()
        self.rows_waiting = 0
        return left

    def _reach(self) -> int:
        """Find the rows that come next, as far as they are here; return the next batch's size."""
        while self._next_rows < self._batch_rows and (span := next(self._sequence, None)):
            self._next.append(span)
            self._next_rows += span[2] - span[1]
        return min(self._batch_rows, self._next_rows)

    def _data_order(self) -> Iterator[Span | None]:
        number = row = 0
        while True:
            known = self._known.get(number, [])
            stop = known[0][1] if known and not known[0][0] else 0
            if row < stop:
                for start, end in uncovered(row, stop, self._done.get(number, ())):
                    yield number, start, end
                row = stop  # more may have come since it was asked for these
            elif self._ends.get(number) == row:
                number, row = number + 1, 0
            else:
                yield None

    def _blocks(self, random: Random) -> Iterator[Span | None]:
        while not self._are_all_here:
            yield None
        ends = [0, *accumulate(self._ends[number] for number in range(len(self._ends)))]
        rows = max(1, self._batch_rows // BATCH_BLOCKS)
        known = {number: [*done] for number, done in self._done.items()}
        for block in permutation(-(-ends[-1] // rows), random):
            start, stop = block * rows, min(block * rows + rows, ends[-1])
            while start < stop:
                number = bisect_right(ends, start) - 1
                first, last = ends[number], min(stop, ends[number + 1])
                # By bisection: there may be many blocks, and as many that are done.
                done = known.setdefault(number, [])
                for low, high in add_range(done, start - first, last - first):
                    yield number, low, high
                start = last

    def _take_batches(self, dealt: dict[int, list[AssignedRange]]) -> bool:
        """Take the whole batches that come next and whose slices lie together in a segment."""
        number, start, stop = self._next[0]
        _, holder, piece = self._pieces[number][self._place_of(number, start)]
        is_alike = (piece.batch_rows, len(piece.skips)) == (self._batch_rows, len(self._nodes))
        batches = (min(stop, piece.start + piece.rows) - start) // self._batch_rows
        if not batches or not is_alike or start % self._batch_rows:
            return False
        stop = start + batches * self._batch_rows
        slices = Slice.all(self._batch_rows, len(self._nodes))
        for node, of_slice, before in zip(self._nodes, slices, piece.skips, strict=True):
            if rows := batches * of_slice.size:
                window = piece.number, before + of_slice.before(start), rows
                each = AssignedRange(holder, *window, ((number, start, stop),), of_slice)
                dealt[node].append(self._counted(node, each))
        self._pass(stop)
        return True

    def _take_slice(self, node: int, rows: int) -> Iterator[AssignedRange]:
        while rows:
            number, start, stop = self._next[0]
            _, holder, piece = self._pieces[number][self._place_of(number, start)]
            stop = min(stop, piece.start + piece.rows, start + rows)
            skip, of_slice = piece.skip + start - piece.start, None
            if piece.skips:  # the rows of a batch lie together by their slices
                slices = Slice.all(piece.batch_rows, len(piece.skips))
                of_slice = next(s for s in slices if s.before(start) < s.before(start + 1))
                skip = piece.skips[of_slice.number] + of_slice.before(start)
                stop = min(stop, start - start % of_slice.rows + of_slice.begin + of_slice.size)
            rows -= stop - start
            window = piece.number, skip, stop - start
            each = AssignedRange(holder, *window, ((number, start, stop),), of_slice)
            yield self._counted(node, each)
            self._pass(stop)

    def _counted(self, node: int, each: AssignedRange) -> AssignedRange:
        self.assigned[node] += each.rows
        self.rows_moved += each.rows * (each.holder != node)
        return each

    def _pass(self, stop: int) -> None:
        """Record that the next rows up to `stop`, which are of one span, are dealt."""
        number, start, end = self._next.popleft()
        if stop < end:
            self._next.appendleft((number, stop, end))
        add_range(self._dealt.setdefault(number, []), start, stop)
        self.rows_waiting -= stop - start
        self._next_rows -= stop - start

    def _place_of(self, number: int, row: int) -> int:
        return bisect_right(self._pieces[number], row, key=itemgetter(0)) - 1


def _apart(piece: SpooledRange) -> Iterator[SpooledRange]:
    """Yield the rows of a piece as they lie in its segment."""
    if not piece.skips:
        yield piece
    span = piece.partition, piece.start, piece.start + piece.rows
    slices = Slice.all(piece.batch_rows, len(piece.skips))
    for of_slice, before in zip(slices, piece.skips, strict=True):
        for number, start, stop in Sliced((span,), (of_slice,)):
            skip = before + of_slice.before(start)
            yield SpooledRange(piece.number, number, start, skip, stop - start)
