"""The rows of an epoch: where they are held, and which node gets them. Pure.

Agents report the rows that feeders have brought to them, as ranges. A row is identified by its
partition and its number there, so a row that comes twice, because Spark repeats a task, is
recognised. The table assigns free rows to nodes that run short, so that all nodes get equally many:

    ranges ──▶ in a spool ──▶ assigned to a node
      └────▶ known already: unwanted

A node is given rows of its own agent's spool where that keeps nodes level. Rows of another agent
cross the network once more and are the last resort: at the end of the epoch, or when a node has run
short for a moment, and its own agent has none and gets none.

To shuffle rows over all nodes, the table waits until all rows have come, or a spool is full. It
then deals blocks of them to the nodes in turn, from all agents.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from random import Random

from msgspec import structs

from sparkdl.control.messages import AssignedRange, SpooledRange
from sparkdl.control.rows import PartRows
from sparkdl.core.row_ranges import Range, add_range, merge_ranges
from sparkdl.core.throttle import LOTS_PER_S, period_s

Assigned = dict[int, list[AssignedRange]]

FIRST_GRACE_S = 0.05
GRACE_S = 0.5
"""How long a node without rows waits for rows at its own agent: first rows, later rows. Why wait?
Rows come in bursts, but evenly in the long run."""
PAUSE_S = 1.5
"""How long it waits after its agent's last rows: between two partitions a feeder begins anew."""
WINDOW_NBYTES = 64 * 1024 * 1024
"""The most unread bytes of a node during an epoch, so that a slow node is not given all rows."""
_MOVED_SHARE = 8
"""Rows of other agents are taken in such parts of a window, as own rows may come soon."""
MIN_BLOCKS, MAX_BLOCKS, BLOCK_NBYTES = 16, 256, 1 << 16
"""Rows are shuffled in blocks of `BLOCK_NBYTES`, within these limits of blocks for each node."""
_WINDOW_SHARE = 4
"""A window is at most this part of an agent's memory."""


class _Spool:
    def __init__(self) -> None:
        self.rows = 0
        self.came_s = -math.inf
        self.pieces: deque[SpooledRange] = deque()

    def add(self, piece: SpooledRange) -> None:
        self.rows += piece.rows
        self.pieces.append(piece)

    def take(self, rows: int, from_end: bool) -> list[SpooledRange]:
        taken: list[SpooledRange] = []
        self.rows -= rows
        while rows:
            piece = self.pieces.pop() if from_end else self.pieces.popleft()
            if piece.rows > rows and from_end:
                rest, piece = _split(piece, piece.rows - rows)
                self.pieces.append(rest)
            elif piece.rows > rows:
                piece, rest = _split(piece, rows)
                self.pieces.appendleft(rest)
            taken.append(piece)
            rows -= piece.rows
        return taken


class RowTable:
    """The rows of one epoch. It belongs to the state of the feed that holds it.

    Args:
        ahead: by node, the rows that it had more than others before the epoch.
        done: covered rows by partition: they are not assigned again.
        random: shuffles rows over all nodes; `None` leaves them where they are, if possible.

    Attributes:
        rows_moved: rows assigned to a node from another node's agent.
        due_s: when to assign again without an event.
        is_stuck: it waits for rows for which an agent has no room.
    """

    is_stuck = False

    def __init__(
        self, ahead: Mapping[int, int], done: PartRows, random: Random | None = None
    ) -> None:
        self.assigned: Counter[int] = Counter()
        self.rows_moved = 0
        self.due_s = math.inf
        self._ahead = dict(ahead)
        # Covered rows count as known: if a task brings them again, they are unwanted.
        self._known: dict[int, list[Range]] = {p: merge_ranges(r) for p, r in done.items()}
        self._ends: dict[int, int] = {}
        self._spools: dict[int, _Spool] = {}
        self.rows_waiting = self._nbytes = self._seen = self._num_ranges = 0
        self._room_nbytes: dict[int, int] = {}
        self._least_room_nbytes = sys.maxsize
        self._short_since_s: float | None = None
        self._random = random
        self._waits_for_all = random is not None

    @property
    def has_rows(self) -> bool:
        return self._seen > 0

    @property
    def known(self) -> PartRows:
        """Received or covered rows, by partition."""
        return {part: tuple(ranges) for part, ranges in sorted(self._known.items()) if ranges}

    def add(
        self,
        holder: int,
        ranges: Iterable[SpooledRange],
        room_nbytes: int,
        now_s: float,
        is_full: bool = False,
    ) -> list[SpooledRange]:
        """Enter an agent's rows; return the duplicates. `is_full`: more wait for room there."""
        # A full spool takes no more rows, so the rows that have come must be dealt now.
        self._waits_for_all &= not is_full
        self._room_nbytes[holder] = room_nbytes
        self._least_room_nbytes = min(self._least_room_nbytes, room_nbytes)
        unwanted = list[SpooledRange]()
        for piece in ranges:
            if not piece.rows:
                self._ends[piece.partition] = piece.start
                continue
            stop, at = piece.start + piece.rows, piece.start
            known = self._known.setdefault(piece.partition, [])
            for first, last in add_range(known, piece.start, stop):
                if first > at:
                    unwanted.append(part(piece, at, first))
                self._enter(holder, part(piece, first, last), now_s)
                self.rows_waiting += last - first
                at = last
            if at < stop:
                unwanted.append(part(piece, at, stop))
            self._seen += piece.rows
            self._nbytes += piece.nbytes
            self._num_ranges += 1
        return unwanted

    def _enter(self, holder: int, piece: SpooledRange, now_s: float) -> None:
        spool = self._spools.setdefault(holder, _Spool())
        spool.add(piece)
        spool.came_s = now_s

    def is_complete(self, num_rows: Mapping[int, int]) -> bool:
        return all(
            not rows or self._known.get(part) == [(0, rows)] for part, rows in num_rows.items()
        )

    def assign(self, unread: Mapping[int, int], now_s: float) -> Assigned:
        """Assign rows to nodes that run short; `unread` is 0 for one that waits for a row."""
        assigned: Assigned = {}
        if self._waits_for_all:
            return assigned
        now = Counter(unread)
        while next_ones := self._assign_once(now, now_s):
            for node, more in next_ones.items():
                assigned.setdefault(node, []).extend(more)
                now[node] += sum(each.rows for each in more)
        return assigned

    def _assign_once(self, unread: Mapping[int, int], now_s: float) -> Assigned:
        self.due_s = math.inf
        if not self.rows_waiting:
            return {}
        rooms = {node: self._window(node) - rows for node, rows in unread.items()}
        open_to = [node for node, room in rooms.items() if room > 0]
        # No node has run down to half of its window. Waiting makes ranges larger.
        if not any(2 * unread[node] < self._window(node) for node in open_to):
            return {}
        totals = {node: self._total(node) for node in open_to}
        least = min(totals.values())
        if self._random is None:
            # First choice: rows of the nodes' own agents, up to the total that all nodes can reach.
            own = {node: min(self._waiting_at(node), rooms[node]) for node in open_to}
        else:
            own = {node: max(0, room) for node, room in rooms.items()}
        aim = min(self._total(node) + rows for node, rows in own.items())
        if aim > least:
            self._short_since_s = None
            lacking = sum(max(0, aim - total) for total in totals.values())
            shares = level(min(self.rows_waiting, lacking), [*totals.values()])
            return self._share_out({n: r for n, r in zip(open_to, shares, strict=True) if r})
        # Last resort: rows of other agents, after a grace in which own rows may come, or once an
        # agent holds so many that its feeders will soon have to wait.
        some = {node: -(-self._window(node) // _MOVED_SHARE) for node in open_to}
        if not any(unread[node] < some[node] for node in open_to):
            return {}
        if self._short_since_s is None:
            self._short_since_s = now_s
        # Nodes that train in lockstep take no step until each has a row, so first rows wait less.
        has_begun = all(self.assigned[node] for node in open_to)
        # At least two reports long: agents of large clusters report their rows less often.
        grace_s = max(GRACE_S, 2 * period_s(0.0, len(unread), LOTS_PER_S))
        due_s = self._short_since_s + (grace_s if has_begun else FIRST_GRACE_S)
        due_s = max(due_s, self._came_s(n for n in open_to if totals[n] == least) + PAUSE_S)
        is_full = any(spool.rows >= self._window(n) for n, spool in self._spools.items())
        if now_s < due_s and not is_full:
            self.due_s = due_s
            return {}
        shares = level(
            min(self.rows_waiting, sum(some.values())), [totals[node] for node in open_to]
        )
        return self._share_out({n: min(rooms[n], r) for n, r in zip(open_to, shares, strict=True)})

    def assign_rest(self, nodes: Sequence[int]) -> Assigned:
        nodes = sorted(nodes)
        if not nodes or not self.rows_waiting:
            return {}
        shares = level(self.rows_waiting, [self._total(node) for node in nodes])
        return self._share_out(dict(zip(nodes, shares, strict=True)))

    def withdraw(self) -> dict[int, list[SpooledRange]]:
        left = {holder: [*spool.pieces] for holder, spool in self._spools.items() if spool.pieces}
        self._spools.clear()
        self.rows_waiting = 0
        return left

    def _total(self, node: int) -> int:
        return self._ahead.get(node, 0) + self.assigned[node]

    def _waiting_at(self, node: int) -> int:
        return self._spools[node].rows if node in self._spools else 0

    def _came_s(self, nodes: Iterable[int]) -> float:
        """Return the latest arrival at the spools of these nodes that are empty now."""
        spools = [self._spools[node] for node in nodes if node in self._spools]
        return max((spool.came_s for spool in spools if not spool.rows), default=-math.inf)

    def _window(self, node: int) -> int:
        """Return how many unread rows a node may have: at least a segment's."""
        room_nbytes = self._room_nbytes.get(node, self._least_room_nbytes)
        nbytes = min(WINDOW_NBYTES, room_nbytes // _WINDOW_SHARE)
        return max(nbytes * self._seen // max(1, self._nbytes), self._seen // self._num_ranges)

    def _share_out(self, shares: Mapping[int, int]) -> Assigned:
        """Give each node so many rows: of its own agent's spool, then of the fullest ones."""
        if self._random is not None:
            return self._deal(shares, self._random)
        assigned: Assigned = {}
        left: dict[int, int] = {}
        for node, rows in shares.items():
            own = min(rows, self._waiting_at(node))
            if own > 0:
                self._take(assigned, node, node, own)
            if rows > own:
                left[node] = rows - own
        for node, rows in left.items():
            while rows and self.rows_waiting:
                holder = max(self._spools, key=self._waiting_at)
                taken = min(rows, self._waiting_at(holder))
                self._take(assigned, node, holder, taken)
                self.rows_moved += taken
                rows -= taken
        return assigned

    def _take(self, assigned: Assigned, node: int, holder: int, rows: int) -> None:
        pieces = self._spools[holder].take(rows, from_end=node != holder)
        assigned.setdefault(node, []).extend(windows(_window(holder, p) for p in pieces))
        self.assigned[node] += rows
        self.rows_waiting -= rows

    def _deal(self, shares: Mapping[int, int], random: Random) -> Assigned:
        # Blocks are small enough to mix the spools, and large enough to keep ranges few.
        nbytes = self._nbytes * self.rows_waiting // max(1, self._seen)
        blocks = min(MAX_BLOCKS, max(MIN_BLOCKS, nbytes // len(shares) // BLOCK_NBYTES))
        most = max(1, self.rows_waiting // (len(shares) * blocks))
        deck = [
            (holder, block)
            for holder, spool in self._spools.items()
            for piece in spool.take(spool.rows, from_end=False)
            for block in _blocks(piece, most)
        ]
        random.shuffle(deck)
        assigned: Assigned = {}
        for node, rows in shares.items():
            left = rows
            while left:
                holder, block = deck.pop()
                if block.rows > left:
                    block, rest = _split(block, left)
                    deck.append((holder, rest))
                assigned.setdefault(node, []).append(_window(holder, block))
                self.rows_moved += block.rows if holder != node else 0
                left -= block.rows
            self.assigned[node] += rows
            self.rows_waiting -= rows
        # Rows that were not dealt this time wait in their spools again.
        for holder, block in deck:
            self._spools[holder].add(block)
        return assigned


def windows(ranges: Iterable[AssignedRange]) -> Iterator[AssignedRange]:
    """Yield the same rows; those that follow each other in a segment make one window."""
    window: list[AssignedRange] = []
    for each in ranges:
        if window and not _follows(each, window[-1]):
            yield _joined(window)
            window = []
        window.append(each)
    yield _joined(window)


def _follows(each: AssignedRange, last: AssignedRange) -> bool:
    is_next = each.skip == last.skip + last.rows and each.number == last.number
    return is_next and (each.holder, each.of_slice) == (last.holder, last.of_slice)


def _joined(window: Sequence[AssignedRange]) -> AssignedRange:
    if len(window) == 1:
        return window[0]
    rows, spans = sum(each.rows for each in window), tuple(s for each in window for s in each.spans)
    return structs.replace(window[0], rows=rows, spans=spans)


def _window(holder: int, piece: SpooledRange) -> AssignedRange:
    span = piece.partition, piece.start, piece.start + piece.rows
    return AssignedRange(holder, piece.number, piece.skip, piece.rows, (span,))


def level(num_rows: int, totals: Sequence[int]) -> list[int]:
    """Share rows out so that the nodes' totals become as even as they can.

    Like water poured into a vessel with an uneven floor: the lowest nodes fill up to the next
    lowest, then those rise together. Rows of an incomplete layer go one each to the lowest nodes,
    the lower index first.
    """
    shares = [0] * len(totals)
    by_total = sorted((total, node) for node, total in enumerate(totals))
    wet, held = 0, num_rows  # how many nodes get water; water plus the floor below it
    for total, _ in by_total:
        if wet and held < total * wet:  # the water stands below this node's floor
            break
        wet, held = wet + 1, held + total
    surface, remainder = divmod(held, wet)
    for position, (total, node) in enumerate(by_total[:wet]):
        shares[node] = surface - total + (position < remainder)
    return shares


def _blocks(piece: SpooledRange, rows: int) -> Iterator[SpooledRange]:
    while piece.rows > rows:
        block, piece = _split(piece, rows)
        yield block
    yield piece


def _split(piece: SpooledRange, rows: int) -> tuple[SpooledRange, SpooledRange]:
    middle = piece.start + rows
    return part(piece, piece.start, middle), part(piece, middle, piece.start + piece.rows)


def part(piece: SpooledRange, start: int, stop: int) -> SpooledRange:
    skip = piece.skip + start - piece.start
    of = piece.number, piece.partition, start, skip, stop - start
    return SpooledRange(*of, batch_rows=piece.batch_rows, skips=piece.skips)
