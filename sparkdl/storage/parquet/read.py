"""The rows of a node's share of a Parquet data set, as record batches of bounded size.

Runs in: agent

Row groups are decoded on threads of their own, the next ones while the first is delivered, each
into a queue of its own that is bounded. Arrow's threads decode the columns of each.

Why not the scanner of `pyarrow.dataset`? It decodes whole row groups, however large the writer made
them, and several at once. With 784 floats a row on two loaded cores, medians of five rounds:

    row groups of 150 MB    9,000 rows/s, 1.2 GB decoded     here 54,000 rows/s, 77 MB
    row groups of 31 MB    20,000 rows/s, 370 MB decoded     here 53,000 rows/s, 43 MB

Limited to one file and two batches ahead it read 22,000 rows/s with 0.8 GB, and 48,000 with 115 MB.
It needs less memory only with many small files, 7 MB instead of 16, and is no faster there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from queue import SimpleQueue

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from sparkdl.control.rows import DataFile, FileRange, Share
from sparkdl.core.errors import ReadError
from sparkdl.core.failure import Code
from sparkdl.core.row_ranges import Range, merge_ranges, overlap
from sparkdl.storage.parquet.source import convert, has_text
from sparkdl.storage.systems import READ_NBYTES, open_file, open_storage
from sparkdl.values.batches import halve, join_small

Batches = Generator[pa.RecordBatch, None, None]

BATCH_NBYTES = 8 * 1024 * 1024
PREFETCH_NBYTES = 64 * 1024 * 1024
_MAX_TEXT_ROWS = 65_536
"""Rows decoded at once where the sizes of strings are a guess (dictionaries hide them)."""
_JOINED_NBYTES = 16 * 1024 * 1024
"""Small row groups of a file are read together up to this size."""
_CACHED_FOOTERS = 16
_MAX_READERS = 8
_CLOSE_S = 30.0
_SMALL = 4
"""Batches below this part of the limit are joined, as many small files give them."""


@dataclass(frozen=True)
class _Piece:
    """Ranges of one file that are read in one go, their row groups ascending."""

    file: DataFile
    ranges: tuple[FileRange, ...]

    @property
    def nbytes(self) -> int:
        return self.file.row_nbytes * sum(part.num_rows for part in self.ranges)


def read_share(
    share: Share, *, batch_nbytes: int = BATCH_NBYTES, prefetch_nbytes: int = PREFETCH_NBYTES
) -> Batches:
    """Yield the rows of a share, in its order; all batches have the share's schema.

    Closing the generator waits for its threads, and these for the batch that they decode.

    Args:
        share: from `ParquetSource.shares`.
        batch_nbytes: a batch's limit; a larger row comes alone.
        prefetch_nbytes: about how much may be decoded ahead of the yielded batches. The decoders'
            own memory is not counted: for storages other than local ones, the compressed bytes of
            the wanted columns of the row groups that are being read, two at least.
    """
    reader = _Reader(open_storage(share.storage), share, batch_nbytes)
    largest = max([batch_nbytes, *(file.row_nbytes for file in share.files)])
    # Closed at once when the caller stops, and not when the garbage collector finds the generator.
    with closing(_in_order(_pieces(share), reader.read, largest, prefetch_nbytes)) as batches:
        yield from join_small(batches, batch_nbytes // _SMALL)


def _pieces(share: Share) -> Iterator[_Piece]:
    ranges: list[FileRange] = []
    nbytes = 0
    for part in share.ranges:
        more = share.files[part.file].row_nbytes * part.num_rows
        if ranges and not _is_read_with(part, ranges[-1], nbytes + more):
            yield _Piece(share.files[ranges[0].file], tuple(ranges))
            ranges, nbytes = [], 0
        ranges.append(part)
        nbytes += more
    if ranges:
        yield _Piece(share.files[ranges[0].file], tuple(ranges))


def _is_read_with(part: FileRange, last: FileRange, nbytes: int) -> bool:
    """Whether a range is read in one go with those up to `last`, which are `nbytes` with it."""
    if part.file != last.file:
        return False
    # The remaining rows of a row group may be many ranges; the group is decoded once.
    if part.row_group == last.row_group:
        return part.start >= last.stop
    return part.row_group > last.row_group and nbytes <= _JOINED_NBYTES


class _Reader:
    """Decodes pieces; used by several threads at once."""

    def __init__(self, system: pafs.FileSystem, share: Share, batch_nbytes: int) -> None:
        self._system = system
        self._schema = pa.ipc.read_schema(pa.py_buffer(share.schema))
        self._stored_as = share.stored_as or tuple(self._schema.names)
        self._refuses_nulls = share.refuses_nulls
        self._has_text = any(map(has_text, self._schema.types))
        self._batch_nbytes = batch_nbytes
        # For the footers: several threads read pieces of one file.
        self._lock = threading.Lock()
        self._footers: dict[str, pq.FileMetaData] = {}  # of the files read last

    def read(self, piece: _Piece) -> Batches:
        try:
            with self._open(piece.file) as file:
                wanted = _wanted_rows(piece, file.metadata)
                for batch in _select(self._decode(piece, file), wanted):
                    yield from halve(self._complete(batch), self._batch_nbytes)
        except (OSError, pa.ArrowException, KeyError) as error:
            groups = sorted(part.row_group for part in piece.ranges)
            raise ReadError(
                f"{piece.file.path}, row groups {groups[0]} to {groups[-1]}: {error}. Has the file "
                "been replaced since the feed began, or is it not on all nodes?"
            ) from error

    def _open(self, wanted: DataFile) -> pq.ParquetFile:
        path = wanted.path
        # The length and not the time, because hosts may have copies of their own.
        if wanted.nbytes >= 0 and self._system.get_file_info(path).size != wanted.nbytes:
            raise ReadError(
                f"{path} has changed since Spark listed it for the DataFrame, or differs on this "
                "host. Make the DataFrame again (spark.read.parquet), or give reader='spark'"
            )
        with self._lock:
            footer = self._footers.get(path)
        file = open_file(self._system, path, footer)
        with self._lock:
            self._footers[path] = file.metadata
            if len(self._footers) > _CACHED_FOOTERS:
                del self._footers[next(iter(self._footers))]
        return file

    def _decode(self, piece: _Piece, file: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
        rows = max(1, self._batch_nbytes * 15 // 16 // piece.file.row_nbytes)
        if self._has_text:
            rows = min(rows, _MAX_TEXT_ROWS)
        groups = list(dict.fromkeys(part.row_group for part in piece.ranges))
        batches: Iterator[pa.RecordBatch] = file.iter_batches(
            rows, groups, list(self._stored_as), use_threads=piece.nbytes > READ_NBYTES
        )
        return batches

    def _complete(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = [
            convert(batch.column(name), field.type)
            for field, name in zip(self._schema, self._stored_as, strict=True)
        ]
        whole = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        for name in self._refuses_nulls:
            if whole.column(name).null_count:
                raise ReadError(
                    f"{Code.NULL_VALUE.mark(name)} column {name!r} holds a null, for which the "
                    "DataFrame raises an error"
                )
        return whole


def _wanted_rows(piece: _Piece, footer: pq.FileMetaData) -> list[Range]:
    """Return which rows of the piece's row groups, laid end to end, are wanted."""
    wanted, offset, rows, last = [], 0, 0, -1
    for part in piece.ranges:
        groups = footer.num_row_groups
        if part.row_group != last:
            offset, last = offset + rows, part.row_group
            rows = footer.row_group(last).num_rows if last < groups else 0
        if part.stop > rows:
            raise ReadError(
                f"{piece.file.path} has {rows} rows in row group {part.row_group}, not "
                f"{part.stop} as planned: it has been replaced since the feed began"
            )
        wanted.append((offset + part.start, offset + part.stop))
    return merge_ranges(wanted)


def _select(batches: Iterator[pa.RecordBatch], wanted: Sequence[Range]) -> Iterator[pa.RecordBatch]:
    """Yield the wanted rows; what comes after the last of them is not decoded."""
    offset = 0
    for batch in batches:
        end = offset + batch.num_rows
        for start, stop in overlap(offset, end, wanted):
            yield batch.slice(start - offset, stop - start)
        if not wanted or end >= wanted[-1][1]:
            return
        offset = end


def _in_order(
    pieces: Iterable[_Piece],
    read: Callable[[_Piece], Batches],
    batch_nbytes: int,
    prefetch_nbytes: int,
) -> Batches:
    """Decode pieces ahead of time on threads, two at once and more that are small; yield in order.

    Closing the generator waits for its threads, and these for the batch that they make. What `read`
    raises comes after the batches before it.

    Args:
        batch_nbytes: of the largest batch.
        prefetch_nbytes: the most that is held ahead, give or take a batch for each piece.
    """
    # Two pieces are decoded at a time, and each gets half of what may be ahead.
    ahead_of_each = max(1, prefetch_nbytes // 2 // batch_nbytes)
    waiting, started = deque(pieces), deque[_Ahead]()
    try:
        while waiting or started:
            while waiting and _may_start(started, waiting[0], prefetch_nbytes):
                started.append(_Ahead(waiting.popleft(), read, ahead_of_each))
            yield from started[0]
            started.popleft().join()
    finally:
        # All are stopped before any is joined: they end side by side.
        for ahead in started:
            ahead.stop()
        for ahead in started:
            ahead.join()


def _may_start(started: Iterable[_Ahead], piece: _Piece, prefetch_nbytes: int) -> bool:
    sizes = [ahead.nbytes for ahead in started]
    is_small = len(sizes) < _MAX_READERS and sum(sizes) + piece.nbytes <= prefetch_nbytes
    # The second piece is decoded while the first is delivered, whatever its size.
    return len(sizes) < 2 or is_small


class _Ahead:
    def __init__(self, piece: _Piece, read: Callable[[_Piece], Batches], num_batches: int) -> None:
        self.nbytes = piece.nbytes
        self._room = threading.Semaphore(num_batches)
        self._found = SimpleQueue[pa.RecordBatch | BaseException | None]()
        self._is_stopped = False
        self._thread = threading.Thread(
            target=self._run, args=(piece, read), name="sparkdl-parquet", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        while isinstance(found := self._found.get(), pa.RecordBatch):
            self._room.release()
            yield found
        if found is not None:
            raise found

    def stop(self) -> None:
        self._is_stopped = True
        # The thread may be waiting for room: it wakes up, and finds that it is stopped.
        self._room.release()

    def join(self) -> None:
        self._thread.join(_CLOSE_S)

    def _run(self, piece: _Piece, read: Callable[[_Piece], Batches]) -> None:
        end: BaseException | None = None
        try:
            with closing(read(piece)) as batches:
                for batch in batches:
                    # Room first: the batch in hand is the only one beyond the limit.
                    self._room.acquire()
                    if self._is_stopped:
                        break
                    self._found.put(batch)
        except BaseException as error:  # noqa: BLE001 - raised where the batches are taken
            end = error
        self._found.put(end)
