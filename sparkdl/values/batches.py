"""Record batches with the same rows in another form: joined, cut, as bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from sparkdl.core.deadline import Deadline


def join(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return the rows of several batches as one; a single batch is not copied."""
    if len(batches) == 1:
        return batches[0]
    # pyarrow 18 lacks pa.concat_batches.
    (batch,) = pa.Table.from_batches(batches).combine_chunks().to_batches() or batches[:1]
    return batch


def to_ipc(batch: pa.RecordBatch) -> bytes:
    """Return a batch as an Arrow IPC stream; of a slice only its rows."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def from_ipc(data: bytes) -> pa.RecordBatch:
    return pa.ipc.open_stream(data).read_next_batch()


def join_small(
    batches: Iterator[pa.RecordBatch], min_nbytes: int, max_wait_s: float | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in batches of at least `min_nbytes`, where schemas and time allow."""
    small: list[pa.RecordBatch] = []
    small_nbytes, is_late = 0, Deadline.after(None)
    for batch in batches:
        # A segment costs a descriptor, so none is made for an empty batch.
        if not batch.num_rows:
            continue
        nbytes = batch.nbytes
        # Metadata is compared too, because it holds the codecs of an RDD's rows (`rows.py`).
        if small and (nbytes >= min_nbytes or not batch.schema.equals(small[0].schema, True)):
            yield join(small)
            small, small_nbytes = [], 0
        if nbytes >= min_nbytes:
            yield batch
            continue
        if not small:
            is_late = Deadline.after(max_wait_s)
        small.append(batch)
        small_nbytes += nbytes
        if small_nbytes >= min_nbytes or is_late.has_passed:
            yield join(small)
            small, small_nbytes = [], 0
    if small:
        yield join(small)


def halve(batch: pa.RecordBatch, max_nbytes: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a batch in pieces of `max_nbytes` at most; a larger row comes alone."""
    if batch.num_rows <= 1 or batch.nbytes <= max_nbytes:
        yield batch
        return
    # Slices share the buffers of the batch, and `nbytes` counts only the slice's part of them.
    middle = batch.num_rows // 2
    yield from halve(batch.slice(0, middle), max_nbytes)
    yield from halve(batch.slice(middle), max_nbytes)
