"""One epoch of a feed as batches of columns: gathered, shuffled, cut, in step with other nodes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa

from sparkdl.control.messages import EpochEnd
from sparkdl.core.errors import ConfigError
from sparkdl.core.row_ranges import Slice
from sparkdl.feed.reader.consumed import Origin, Part, part_of, positions_of
from sparkdl.feed.reader.cursor import HEAD_STEPS, Item
from sparkdl.feed.reader.reader import FeedReader, too_few_rows
from sparkdl.values.columns import (
    Packed,
    concat,
    csr_array,
    is_csr,
    is_within,
    slice_columns,
    to_columns,
    unpacked,
)
from sparkdl.values.tensors import Padding, check_padding, padded, stored

SAMPLE_WEIGHT = "sample_weight"
"""The column of `tail="pad"`: float32 `[rows]`, read-only: 1 for rows fed, 0 for padding."""
SHUFFLE_NBYTES = 32 * 1024 * 1024
"""Rows are shuffled within so many bytes where no number of rows is given."""
Columns = dict[str, np.ndarray[Any, Any]]
"""Arrays by column name, all with the same first dimension: `[rows, …]`."""
Weights = np.ndarray[Any, Any] | None
Names = str | Sequence[str]
Tail = Literal["short", "pad", "drop"]


class _BatchMark(Enum):
    """What an iteration yields besides batches.

    A batch FOLLOWS: it is made when the next element is asked for. The iteration is OVER: the epoch
    is left when the next element is asked for.
    """

    FOLLOWS = auto()
    OVER = auto()


Step = Columns | _BatchMark


@dataclass
class _Part:
    columns: Columns
    start: int
    stop: int
    origin: Origin

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def positions(self) -> list[Part]:
        return part_of(self.origin, self.start, self.stop)

    def first(self, rows: int) -> _Part:
        start, self.start = self.start, self.start + rows
        return _Part(self.columns, start, self.start, self.origin)


@dataclass(frozen=True)
class Slices:
    """The part of each global batch that a node gets, see `Feeding(global_batch_size=…)`.

    Attributes:
        nodes: the ids of those that share a batch, by rank.
        index: of this node among them.
        first_row: has the first node's row sent to all, where nodes have none.
    """

    batch_rows: int
    nodes: tuple[int, ...]
    index: int
    first_row: Callable[[FeedReader], pa.RecordBatch] | None = field(default=None, compare=False)

    def of(self, rows: int, index: int | None = None) -> int:
        """Return how many of a batch's rows this node gets, or another one."""
        return Slice(rows, self.index if index is None else index, len(self.nodes)).size

    def total(self, by_node: Mapping[int, int]) -> int:
        """Return how many rows of an epoch make steps; without those that not all nodes got."""
        rows = [by_node.get(node, 0) for node in self.nodes]
        batches, rest = divmod(sum(rows), self.batch_rows)
        sizes = [self.of(self.batch_rows, i) for i in range(len(rows))]
        if rows == [batches * size + self.of(rest, i) for i, size in enumerate(sizes)]:
            return sum(rows)
        return self.batch_rows * min(n // size for n, size in zip(rows, sizes, strict=True))


@dataclass
class EpochBatches:
    """Each `iter` is one epoch: the next of the feed, or the same again if it was left early.

    Attributes:
        is_even: all nodes take the same number of steps, as synchronous training requires.
        tail: the use of the rows at an epoch's end that do not fill a step on every node.
            short: they make smaller batches. Each row is used once; only a node that runs out of
                rows before the others gets one of its last again.
            pad: batches are filled up with rows of weight 0, see `SAMPLE_WEIGHT`. drop: not used.
        shuffle: `True` mixes rows within some 32 MB; a number, within that many rows. An epoch that
            is read from the node's log has its segments in random order as well.
        seed: of the random order, which differs from epoch to epoch, and where one begins again.
        pad: columns whose rows are filled up to one length, see `tensors.padded`.
        steps: each `iter` has this many batches, see `_Passes`.
        sparse: columns of vectors that become a `csr_array`; rows of weight 0 are empty in them.
        convert: takes each batch, as it is handed out.
        slices: of global batches in a fixed order. Then `batch_size` follows from them.
        stored: the columns that are read of the feed.
    """

    reader: FeedReader
    batch_size: int
    columns: tuple[str, ...] | None = None
    is_even: bool = False
    tail: Tail = "short"
    shuffle: bool | int = False
    seed: int = 0
    pad: Padding = field(default_factory=dict)
    steps: int | None = None
    sparse: Sequence[str] = ()
    convert: Callable[[Columns], Columns] | None = None
    slices: Slices | None = None
    _carried: list[_Part] = field(default_factory=list, init=False, repr=False, compare=False)
    _carried_by_node: dict[int, int] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size={self.batch_size} must be at least 1")
        if self.tail not in get_args(Tail):
            raise ConfigError(f"tail={self.tail!r} must be one of {', '.join(get_args(Tail))}")
        if not isinstance(self.shuffle, int | np.integer) or self.shuffle < 0:
            hint = ". To mix the rows of all nodes, call cluster.feed(…, shuffle='global')"
            raise ConfigError(
                f"shuffle={self.shuffle!r} must be True, False or a number of rows"
                + hint * isinstance(self.shuffle, str)
            )
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"steps={self.steps} must be at least 1, or None for a whole epoch")
        if self.slices is not None:
            self._check_slices(self.slices)
        check_padding(self.pad)
        self._check_sparse()
        self.stored = stored(self.columns, self.pad)

    def _check_slices(self, slices: Slices) -> None:
        most = slices.of(slices.batch_rows, 0)
        self.batch_size = most if self.tail == "pad" else slices.of(slices.batch_rows)
        if self.shuffle:
            raise ConfigError(
                f"shuffle={self.shuffle!r} must be False in the fixed order of Feeding("
                f"global_batch_size={slices.batch_rows}). To shuffle the rows for all nodes, call "
                "cluster.feed(…, shuffle='global')"
            )
        if self.tail == "drop" and slices.batch_rows % len(slices.nodes):
            raise ConfigError(
                f"tail='drop': Feeding(global_batch_size={slices.batch_rows}) cannot be divided "
                f"among {len(slices.nodes)} nodes. Use 'short' or 'pad', whose column "
                f"{SAMPLE_WEIGHT!r} makes up for slices of different sizes"
            )

    def _check_sparse(self) -> None:
        if not isinstance(self.sparse, list | tuple):
            raise ConfigError(
                f"sparse={self.sparse!r}: must be a list of the names of columns of vectors, like "
                "sparse=['features']"
            )
        if both := [name for name in self.sparse if name in self.pad]:
            raise ConfigError(
                f"sparse= and pad= name {both[0]!r}: pad= fills up arrays of different lengths, "
                "and vectors have one size. Leave it out of pad="
            )
        self.sparse = tuple(self.sparse)  # equal options continue an iteration
        if self.sparse:
            csr_array()

    def peek(self) -> pa.RecordBatch | None:
        """Wait for rows of the feed, which tell the types; `None` at its end."""
        row = self.first_row()
        return self.reader.peek_batch(is_needed=True) if row is None else row

    def first_row(self) -> pa.RecordBatch | None:
        """Return a row of another node, if this epoch is a batch with fewer rows than nodes."""
        send = self.slices and self.slices.first_row
        return send(self.reader) if send and self.reader.is_short() else None

    def sample(self, batch: pa.RecordBatch) -> Columns:
        """Return the rows of a segment as a batch of the epoch has them; of vectors the first."""
        found: dict[str, Any] = to_columns(batch, self.stored, True, self.sparse)
        few = {n: c[: self.batch_size] if isinstance(c, Packed) else c for n, c in found.items()}
        return self._completed(unpacked(few), self._weights(batch.num_rows))

    def _weights(self, rows: int, repeated: int = 0, total: int = 0) -> Weights:
        """Return the weights of a batch of `rows` rows and `repeated` more, `None` if it has none.

        Args:
            total: rows of a global batch that is not full.
        """
        if self.tail == "drop" or (self.tail == "short" and self.slices is None):
            return None
        weights = np.repeat(np.array([1, 0], np.float32), [rows, repeated])
        if self.slices is not None:
            # A mean over this node's rows, and then over the nodes, is one over the batch's rows.
            weights *= len(weights) * len(self.slices.nodes) / (total or self.slices.batch_rows)
        weights.flags.writeable = False
        return weights

    def _completed(self, columns: Columns, weights: Weights) -> Columns:
        """Return a batch with the columns that are made here."""
        columns = padded(columns, self.pad, self.columns)
        if self.convert is not None:
            columns = self.convert(columns)
        if weights is None:
            return columns
        if SAMPLE_WEIGHT in columns:
            raise ConfigError(
                f"tail={self.tail!r} adds a column {SAMPLE_WEIGHT!r}; rename the one of the feed"
            )
        return {**columns, SAMPLE_WEIGHT: weights}

    def __iter__(self) -> Iterator[Columns]:
        # Not a generator itself: the feed is claimed before the loop's first batch.
        return (step for step in self._begin() if not isinstance(step, _BatchMark))

    def ahead(self) -> Iterator[Columns | None]:
        """Iterate for code that reads ahead: `None` stands behind the last batch.

        The epoch is not over before something is asked for behind it. Ask when the training has
        had all batches: until then the epoch begins again if the loop over it is left.
        """
        steps = (step for step in self._begin(is_ahead=True) if step is not _BatchMark.FOLLOWS)
        return (None if isinstance(step, _BatchMark) else step for step in steps)

    def _begin(self, is_ahead: bool = False) -> Iterator[Step]:
        self.reader.registry.watch.look()
        if self.steps is None:
            return self._iteration(self.reader.claim())
        # At the reader, because a loop may call `ctx.batches(…)` each time.
        passes = self.reader.passes
        if not isinstance(passes, _Passes) or passes.of != self:
            replayed = passes.replayed if passes else 0
            passes = self.reader.passes = _Passes(replace(self), self.steps, replayed)
        return passes.begin(is_ahead)

    def _iteration(self, owner: int) -> Iterator[Step]:
        epoch = _Epoch(self, owner)
        yield from epoch.batches()
        while epoch.continues:
            epoch = _Epoch(self, owner, is_continued=True)
            yield from epoch.batches()


class _Passes:
    """Iterations of a fixed number of batches, each behind the one before it.

    An iteration goes on over the end of an epoch, and has fewer batches at the feed's end alone. It
    ends when it is known whether another batch follows, so that none is empty. One that is left
    within its first `HEAD_STEPS` batches is given these again, because Keras looks at the first
    batch and begins again; behind a later one the next goes on.
    """

    def __init__(self, of: EpochBatches, steps: int, replayed: int) -> None:
        self.steps, self.replayed = steps, replayed
        self.of, self._reader = of, of.reader
        # An iteration that was left may still be read by a thread, of tf.data for example.
        self._lock = threading.Lock()
        self._owner = 0
        self._epoch: Iterator[Step] | None = None
        self._follows = self._is_ahead = False
        self._current = object()
        self._head: list[Columns] = []
        self._count = 0

    def begin(self, is_ahead: bool) -> Iterator[Step]:
        # Without the lock: the earlier one may hold it while it waits for rows.
        self._current = token = object()
        return self._batches(token, is_ahead)

    def _batches(self, token: object, is_ahead: bool) -> Iterator[Step]:
        with self._lock:
            is_own = self._reader.owns(self._owner)
            if not is_own:  # another iteration has begun the epoch again
                self._epoch, self._follows = None, False
            if not is_own or (self._count == self.steps and not self._is_ahead):
                self._head, self._count = [], 0
            self._is_ahead = is_ahead
            again = self._head
        for step in range(self.steps):
            with self._lock:
                if token is not self._current:
                    return
                if step < len(again):
                    self.replayed += 1
                    columns: Columns | None = again[step]
                else:
                    columns = self._next(step)
                if columns is None:
                    break
                self._count = step + 1
                if step >= len(again):
                    self._head = [*self._head, columns] if step < HEAD_STEPS else []
                if token is not self._current:  # since then: the next one is given it again
                    return
            yield columns
            del columns
        yield _BatchMark.OVER
        with self._lock:
            if token is self._current:
                self._count = 0
                self._head = []
                self._has_next()

    def _next(self, step: int) -> Columns | None:
        """Return the next batch of the feed, `None` if there is none for this iteration."""
        while not self._has_next():
            if step and not (self._reader.owns(self._owner) and self._reader.has_epoch()):
                return None
            self._owner = self._reader.claim()
            self._epoch = self.of._iteration(self._owner)
            if not step and not self._has_next():
                return None  # an epoch without rows, or none at all
        assert self._epoch is not None
        self._follows = False
        found = next(self._epoch, None)
        return None if isinstance(found, _BatchMark) else found

    def _has_next(self) -> bool:
        """Whether a batch follows in the epoch; if none does, the epoch is over."""
        if self._epoch is not None and not self._follows:
            epoch, self._epoch = self._epoch, None
            sign = next(epoch, _BatchMark.OVER)
            if sign is _BatchMark.OVER:
                next(epoch, None)
            else:
                self._epoch, self._follows = epoch, True
        return self._follows


class _Epoch:
    """One epoch of an iteration, for the owner of the reader."""

    def __init__(self, of: EpochBatches, owner: int, is_continued: bool = False) -> None:
        self.continues = False
        self._is_continued = is_continued
        self._of = of
        self._reader = of.reader
        self._owner = owner
        self._rows = GatheredRows(of._carried)
        self._is_over = False
        self._mark: EpochEnd | None = None
        self._steps = 0
        self._last: Columns | None = None

    def batches(self) -> Iterator[Step]:
        slices, most = self._of.slices, self._of.batch_size
        size = most if slices is None else slices.of(slices.batch_rows)
        weights = self._of._weights(size, most - size)  # one array for all full batches
        if not self._begin():
            return
        if self._of.is_even:
            # Before any row is taken: shuffled rows cannot go to a node without rows any more.
            self._has_row_everywhere()
        # A row beyond a step proves that it is not the last, whose rows several steps may share.
        ahead = int(slices is not None or (self._of.is_even and self._of.tail == "short"))
        while True:
            if not self._fill(size + ahead):
                return
            if self._is_over:
                break
            if self._may_step():
                if not (yield from self._yield_batch(size, most - size, weights)):
                    return
            elif not self._fill(None):
                return
        yield from self._finish()

    def _fill(self, rows: int | None) -> bool:
        """Gather so many rows, or as many as there are; false once another owner has claimed."""
        while not self._is_over and (rows is None or self._rows.count < rows):
            item = self._reader.take(self._owner)
            if item is None:
                return False
            if isinstance(item, Item):
                self._gather(item)
            else:
                self._is_over = True
                self._mark = item if isinstance(item, EpochEnd) else None
                # The window is not full, but no further rows come.
                self._rows.flush()
        return True

    def _begin(self) -> bool:
        """Wait for the epoch, and prepare it; false once another has claimed."""
        epoch = self._reader.wait_epoch(self._owner, begins=not self._is_continued)
        if epoch is not None and self._of.shuffle:
            # An epoch that begins again has another order: it may be left early again.
            again = self._reader.abandoned
            random = np.random.default_rng((self._of.seed, epoch, *[again] * (again > 0)))
            self._reader.reorder(self._owner, random)
            self._rows.shuffle(random, self._of.shuffle)
        if epoch is not None and (row := self._of.first_row()) is not None:
            self._last = to_columns(row, self._of.stored, True, self._of.sparse)
        return epoch is not None

    def _gather(self, item: Item) -> None:
        columns = to_columns(item.batch(), self._of.stored, True, self._of.sparse)
        if item.skip:
            columns = slice_columns(columns, item.skip, item.segment.rows)
        origin = None if item.origin is None else item.origin + item.skip
        self._rows.add(columns, item.segment.rows - item.skip, origin)

    def _may_step(self) -> bool:
        if not self._of.is_even:
            return True
        if self._of.tail in ("short", "pad") or self._of.slices is not None:
            return self._steps > 0 or self._has_row_everywhere()
        if self._reader.is_granted(self._owner, (self._steps + 1) * self._of.batch_size):
            return True
        # Without the grant the epoch is complete, and its mark has the rows of all nodes.
        mark = self._reader.known_mark(self._owner)
        return mark is not None and self._steps < self._agreed_steps(mark)

    def _has_row_everywhere(self) -> bool:
        """Wait until it is known whether every node has a row: without one it can take no step."""
        if self._reader.is_granted(self._owner, 1):
            return True
        mark = self._reader.known_mark(self._owner)
        return mark is not None and min(mark.rows.values(), default=1) > 0

    def _agreed_steps(self, mark: EpochEnd | None) -> int:
        of = self._of
        if of.slices is not None:
            total = self._total(of.slices)
            return agreed_steps([total], of.slices.batch_rows, of.tail)
        if of.is_even and mark is None and (of.tail == "drop" or of._carried):
            return self._steps  # the feed has ended: no other node takes a step for carried rows
        if of.is_even and mark is not None and mark.rows:
            rows = self._rows_by_node(mark)
            if self._is_short_of_rows(mark, rows):
                return self._steps
        else:
            rows = [self._steps * of.batch_size + self._rows.count]
        return agreed_steps(rows, of.batch_size, of.tail)

    def _rows_of(self, step: int, steps: int) -> tuple[int, int]:
        """Return this node's rows of one of the last steps, and all nodes' if they are known."""
        of = self._of
        if of.slices is not None:
            done = step * of.slices.batch_rows
            total = min(of.slices.batch_rows, self._total(of.slices) - done)
            return of.slices.of(total), total
        if of.tail == "short":
            return next_share(self._rows.count, steps - step, of.batch_size), 0
        return min(of.batch_size, self._rows.count), 0

    def _total(self, slices: Slices) -> int:
        """Return the rows of the epoch on all nodes, as far as all take a step with them."""
        if self._mark is not None and self._mark.rows:
            return slices.total(self._mark.rows)
        rest = self._rows.count if len(slices.nodes) == 1 else 0
        return self._steps * slices.batch_rows + rest

    def _rows_by_node(self, mark: EpochEnd) -> list[int]:
        carried = self._of._carried_by_node
        return [count + carried.get(node, 0) for node, count in mark.rows.items()]

    def _is_short_of_rows(self, mark: EpochEnd, rows: list[int]) -> bool:
        """Whether this rest of an epoch leaves a node without a row, so without a step."""
        is_part = mark.goes_on or self._is_continued
        return is_part and self._of.tail in ("short", "pad") and min(rows) == 0

    def _yield_batch(
        self, rows: int, repeated: int, weights: Weights
    ) -> Generator[Step, None, bool]:
        """Yield a batch of `rows` rows and `repeated` more; return false if another has claimed."""
        yield _BatchMark.FOLLOWS
        parts: list[Part] = []
        if rows:
            # The last batch stays here, because a step without a row repeats one of its rows.
            self._last, parts = self._rows.cut(rows)
        # Counted before it is handed out: another iteration may have claimed the feed meanwhile.
        if not self._reader.give(self._owner, rows, repeated, parts=parts):
            return False
        self._steps += 1
        assert self._last is not None
        columns = self._last
        if repeated:
            order = np.concatenate([np.arange(rows), np.zeros(repeated, np.int64)])
            empty = repeated * (self._of.tail == "pad")
            columns = {
                name: _with_empty(array[:rows], empty) if empty and is_csr(array) else array[order]
                for name, array in columns.items()
            }
        yield self._of._completed(columns, weights)
        return True

    def _finish(self) -> Iterator[Step]:
        size, tail = self._of.batch_size, self._of.tail
        steps = self._agreed_steps(self._mark)
        for step in range(self._steps, steps):
            rows, total = self._rows_of(step, steps)
            if not rows and self._last is None:
                assert self._mark is not None
                raise too_few_rows(self._mark)
            repeated = size - rows if tail == "pad" else int(not rows)
            weights = self._of._weights(rows, repeated, total)
            if not (yield from self._yield_batch(rows, repeated, weights)):
                return
        mark = self._mark
        if mark is None or not mark.goes_on:
            yield _BatchMark.OVER
        rest, waiting = self._rows.rest(), dict[int, int]()
        # The rest of an epoch, without a row for each node, comes first in the next epoch.
        if self._of.is_even and mark is not None and mark.goes_on and mark.rows:
            by_node = self._rows_by_node(mark)
            if self._is_short_of_rows(mark, by_node):
                waiting = dict(zip(mark.rows, by_node, strict=True))
        dropped = [] if waiting else rest
        parts = [each for part in dropped for each in part.positions]
        if self._reader.finish_epoch(self._owner, sum(part.rows for part in dropped), parts):
            # An abandoned epoch comes again, with the rows that had waited for it.
            self._of._carried, self._of._carried_by_node = rest if waiting else [], waiting
            self.continues = mark is not None and mark.goes_on
            if not self.continues:
                self._reader.registry.watch.epoch_over(self._reader.feed)


def _with_empty(rows: Any, many: int) -> Any:
    """Return a `csr_array` with that many rows without values at the end."""
    starts = np.append(rows.indptr, np.full(many, rows.indptr[-1]))
    shape = (rows.shape[0] + many, rows.shape[1])
    return type(rows)((rows.data, rows.indices, starts), shape=shape)


class GatheredRows:
    """Columns of segments that were taken and not handed out; `count` without unshuffled rows."""

    def __init__(self, carried: Sequence[_Part] = ()) -> None:
        self.count = sum(part.rows for part in carried)
        self._parts = deque(replace(part) for part in carried)  # copied, for an abandoned epoch
        self._random: np.random.Generator | None = None
        self._window: int | bool = False
        self._unshuffled: list[_Part] = []
        self._unshuffled_rows = self._unshuffled_nbytes = 0

    def shuffle(self, random: np.random.Generator, window: int | bool) -> None:
        self._random, self._window = random, window

    def add(self, columns: Columns, rows: int, origin: Origin = None) -> None:
        """Take the columns of `rows` rows, all of them with an origin, or none."""
        if not rows:
            return
        part = _Part(columns, 0, rows, origin)
        if self._random is None:
            self._parts.append(part)
            self.count += rows
            return
        self._unshuffled.append(part)
        self._unshuffled_rows += rows
        self._unshuffled_nbytes += sum(array.nbytes for array in columns.values())
        is_enough = (
            self._unshuffled_nbytes >= SHUFFLE_NBYTES
            if self._window is True
            else self._unshuffled_rows >= self._window
        )
        if is_enough:
            self.flush()

    def flush(self) -> None:
        parts, rows = self._unshuffled, self._unshuffled_rows
        self._unshuffled = []
        self._unshuffled_rows = self._unshuffled_nbytes = 0
        if not parts:
            return
        assert self._random is not None
        order = self._random.permutation(rows)
        # A window is copied twice, at the speed of memory. That is why windows are small (32 MB).
        together = concat([part.columns for part in parts])
        columns = {name: array[order] for name, array in together.items()}
        origin: Origin = None
        if parts[0].origin is not None:
            origin = np.concatenate([positions_of(p.origin, p.rows) for p in parts])[order]
        self._parts.append(_Part(columns, 0, rows, origin))
        self.count += rows

    def cut(self, rows: int) -> tuple[Columns, list[Part]]:
        """Remove and return the first `rows` rows, which are here, and where they come from.

        The columns are views where they lie in one segment.
        """
        cut: list[_Part] = []
        self.count -= rows
        while rows:
            cut.append(self._parts[0].first(min(rows, self._parts[0].rows)))
            rows -= cut[-1].rows
            if not self._parts[0].rows:
                self._parts.popleft()
        pieces = [slice_columns(part.columns, part.start, part.stop) for part in cut]
        origins = [each for part in cut for each in part.positions]
        # Sparse rows become arrays here: a batch of them fits in memory where a segment may not.
        return unpacked(pieces[0] if len(pieces) == 1 else concat(pieces)), origins

    def rest(self) -> list[_Part]:
        parts = list(self._parts)
        self._parts.clear()
        self.count = 0
        return parts


def agreed_steps(rows: Sequence[int], batch_size: int, tail: Tail) -> int:
    """Return the number of steps that every node takes in an epoch, by all nodes' rows."""
    if tail in ("short", "pad"):
        return max(-(-count // batch_size) for count in rows)
    return min(count // batch_size for count in rows)


def next_share(rows_left: int, steps_left: int, batch_size: int) -> int:
    """Return the size of the next batch, such that rows are left for the steps after it.

    Full batches come first, then smaller ones that leave a row for each later step. The size is
    zero only for the last steps, and only if fewer rows than steps are left.
    """
    if rows_left < steps_left:
        return min(1, rows_left)
    return min(batch_size, rows_left - (steps_left - 1))


def arrange(columns: dict[str, Any], x: Names | None, y: Names | None) -> Any:
    """Return `(x, y)`; `x` alone without `y`; all columns without both.

    Weights that neither names are another element at the end. Several names make a dict, and so
    does the name of a struct: of its fields, by their whole names.
    """
    if x is None:
        return columns
    named = [names for names in (x, y) if names is not None]
    if SAMPLE_WEIGHT in columns and not any(SAMPLE_WEIGHT in _listed(names) for names in named):
        named.append(SAMPLE_WEIGHT)
    parts = [
        columns[names] if isinstance(names, str) and names in columns else _named(columns, names)
        for names in named
    ]
    return parts[0] if len(parts) == 1 else tuple(parts)


def _named(columns: dict[str, Any], names: Names) -> dict[str, Any]:
    return {
        found: columns[found]
        for name in _listed(names)
        for found in ([name] if name in columns else [c for c in columns if is_within(c, name)])
    }


def _listed(names: Names) -> Sequence[str]:
    return [names] if isinstance(names, str) else names
