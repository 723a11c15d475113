"""Protobuf's wire format for many messages at a time, in numpy and Arrow.

Runs in: driver, feeder

A message is a span [start, end) of one array of bytes, and spans come in the order in which they
lie there. This module reads only the fields that TFRecords consist of, with numbers 1 to 15 and a
length. `IrregularError` means that the record needs protobuf itself.
https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Bytes: TypeAlias = npt.NDArray[np.uint8]
Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]

_FEW = 16
"""Up to so many messages are read faster one by one."""
# 64 bits, seven in a byte.
_MAX_VARINT_NBYTES = 10
_NOTHING = pa.scalar(b"", pa.large_binary())


class IrregularError(Exception):
    """These bytes are not in the form that serialisers write: protobuf has to look at them."""


class Fields(NamedTuple):
    """Fields of messages, in the order in which they lie in the bytes.

    Attributes:
        parent: which message each is of.
        tag: field number times 8, plus 2.
        start: of its content, as is `end`.
    """

    parent: Ints
    tag: Bytes
    start: Ints
    end: Ints


def fields(data: Bytes, starts: Ints, ends: Ints) -> Fields:
    """Return all fields of the messages [starts, ends).

    Raises:
        IrregularError: if a field has no length, or it is longer than its message.
    """
    rounds: list[Fields] = []  # the first field of each message, the second of each, and so on
    parent = np.flatnonzero(starts < ends)
    cursor, stop = starts[parent], ends[parent]
    while len(parent) > _FEW:
        # A broken length leads beyond the bytes: clipped here, and refused by the check of `end`.
        tag = data.take(cursor, mode="clip")
        length, start = _lengths(data, cursor + 1)
        end = start + length
        # A tag of one byte (fields 1 to 15) and of wire type 2, which has a length.
        if (end > stop).any() or (tag & 0x87 != 2).any():
            raise IrregularError
        rounds.append(Fields(parent, tag, start, end))
        going = end < stop
        if going.all():
            cursor = end
        else:
            parent, cursor, stop = parent[going], end[going], stop[going]
    is_even = not len(parent) and all(len(each.parent) == len(starts) for each in rounds)
    if len(parent):
        rounds.append(_one_by_one(data, parent, cursor, stop))
    if not rounds:
        none = np.empty(0, np.int64)
        return Fields(none, np.empty(0, np.uint8), none, none)
    if len(rounds) == 1:
        return rounds[0]
    # All messages have as many fields, as records of one writer do: no sort is needed.
    if is_even:
        return Fields._make(
            np.stack(arrays, axis=1).ravel() for arrays in zip(*rounds, strict=True)
        )
    joined = [np.concatenate(arrays) for arrays in zip(*rounds, strict=True)]
    order = np.argsort(joined[2], kind="stable")
    return Fields._make(array[order] for array in joined)


def _lengths(data: Bytes, at: Ints) -> tuple[Ints, Ints]:
    """Return the varints at these places, and where each ends."""
    byte = data.take(at, mode="clip")
    value, at = (byte & 0x7F).astype(np.int64), at + 1
    more = np.flatnonzero(byte >= 0x80)
    shift = 7
    while len(more):
        # Messages of protobuf have 2 GiB at most, so a longer number is no length.
        if shift > 35:
            raise IrregularError
        byte = data.take(at[more], mode="clip")
        value[more] |= (byte & 0x7F).astype(np.int64) << shift
        at[more] += 1
        more = more[byte >= 0x80]
        shift += 7
    return value, at


def _one_by_one(data: Bytes, parents: Ints, cursors: Ints, stops: Ints) -> Fields:
    view = data.data
    found: list[tuple[int, int, int, int]] = []
    for parent, cursor, stop in zip(
        parents.tolist(), cursors.tolist(), stops.tolist(), strict=True
    ):
        at = cursor
        while at < stop:
            tag, length, shift, byte = view[at], 0, 0, 0x80
            while byte >= 0x80:
                at += 1
                if at >= stop or shift > 35:
                    raise IrregularError
                byte = view[at]
                length |= (byte & 0x7F) << shift
                shift += 7
            start, at = at + 1, at + 1 + length
            if at > stop or tag & 0x87 != 2:
                raise IrregularError
            found.append((parent, tag, start, at))
    table = np.array(found, np.int64).reshape(-1, 4)
    return Fields(table[:, 0], table[:, 1].astype(np.uint8), table[:, 2], table[:, 3])


def only_field(data: Bytes, starts: Ints, ends: Ints) -> tuple[Bytes, Ints, Ints]:
    """Return tag, start and end of the one field of each message; tag 0 where there is none.

    Raises:
        IrregularError: if a message has several.
    """
    found = fields(data, starts, ends)
    if len(found.parent) == len(starts) and (np.diff(found.parent) > 0).all():
        return found.tag, found.start, found.end
    if len(found.parent) and not (np.diff(found.parent) > 0).all():
        raise IrregularError
    tag, start, end = np.zeros(len(starts), np.uint8), ends.copy(), ends.copy()
    tag[found.parent], start[found.parent] = found.tag, found.start
    end[found.parent] = found.end
    return tag, start, end


def gather(data: Bytes, starts: Ints, ends: Ints) -> pa.LargeBinaryArray:
    """Return the bytes of these spans, as one array without gaps."""
    if not len(starts):
        return pa.array([], pa.large_binary())
    # Spans are every other element of an array with these offsets: Arrow copies them in one call.
    offsets = np.empty(2 * len(starts), np.int64)
    offsets[0::2], offsets[1::2] = starts, ends
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    spans = pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)
    return spans.take(pa.array(np.arange(0, len(offsets), 2)))


def contents(array: pa.LargeBinaryArray) -> tuple[Ints, Bytes]:
    """Return the offsets of an array of bytes, one more than values, and the bytes they are into.

    Nulls are empty.
    """
    _, offsets, data = array.buffers()
    places = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    if not len(places):
        places = np.zeros(1, np.int64)
    return places, np.frombuffer(data or b"", np.uint8)[: places[-1]]


def from_contents(offsets: Ints, data: Any, is_valid: Bools | None = None) -> pa.Array:
    """Return an array of n byte strings, given the n + 1 `offsets` of their contents in `data`."""
    validity = None
    if is_valid is not None and not is_valid.all():
        validity = pa.py_buffer(np.packbits(is_valid, bitorder="little"))
    buffers = [validity, pa.py_buffer(np.ascontiguousarray(offsets, np.int64)), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)


def prefixed(array: pa.LargeBinaryArray, prefix: Callable[[int], bytes]) -> pa.LargeBinaryArray:
    """Put `prefix(length)` before each value that is not null."""
    offsets, _ = contents(array)
    # Values have few different lengths, so each prefix is made once.
    lengths, which = np.unique(np.diff(offsets), return_inverse=True)
    prefixes = pa.array([prefix(length) for length in lengths.tolist()], pa.large_binary())
    return join([prefixes.take(pa.array(which)), array], nulls="emit_null")


def join(arrays: list[pa.LargeBinaryArray], nulls: str = "replace") -> pa.LargeBinaryArray:
    """Join values end to end, place by place; nulls count as empty, or make null (`emit_null`)."""
    return pc.binary_join_element_wise(*arrays, _NOTHING, null_handling=nulls, null_replacement="")


def varint(value: int) -> bytes:
    """Return a number of any size, not negative, as protobuf writes it."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, length: int) -> bytes:
    """Return what stands before the content of a field of this length."""
    return varint(number << 3 | 2) + varint(length)


def encode_varints(values: Ints) -> tuple[Bytes, Ints]:
    """Return the bytes of 64-bit numbers, and the n + 1 offsets of each in them."""
    # As unsigned, because protobuf writes a negative int64 as ten bytes.
    rest = values.view(np.uint64)
    lengths = np.ones(len(values), np.int64)
    for nbytes in range(1, _MAX_VARINT_NBYTES):
        longer = rest >= np.uint64(1 << 7 * nbytes)
        if not longer.any():
            break
        lengths += longer
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    out = np.empty(offsets[-1], np.uint8)
    for k in range(int(lengths.max(initial=0))):
        which = np.flatnonzero(lengths > k)
        low = (rest[which] >> np.uint64(7 * k) & np.uint64(0x7F)).astype(np.uint8)
        out[offsets[which] + k] = low | np.where(lengths[which] > k + 1, 0x80, 0).astype(np.uint8)
    return out, offsets


def decode_varints(data: Bytes, ends: Ints) -> tuple[Ints, Ints]:
    """Return 64-bit numbers, and how many lie before each of `ends`.

    Raises:
        IrregularError: if a number is longer than it may be, or one of `ends` is within it.
    """
    is_last = data < 0x80
    counts = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_last)])[ends]
    inner = ends[ends > 0]
    if not is_last[inner - 1].all():
        raise IrregularError
    if is_last.all():
        return data.astype(np.int64), counts
    last = np.flatnonzero(is_last)
    first = np.concatenate([np.zeros(1, np.int64), last[:-1] + 1])
    lengths = last - first + 1
    longest = int(lengths.max())
    if longest > _MAX_VARINT_NBYTES:
        raise IrregularError
    values = (data[first] & 0x7F).astype(np.uint64)
    for k in range(1, longest):
        which = np.flatnonzero(lengths > k)
        values[which] |= (data[first[which] + k] & 0x7F).astype(np.uint64) << np.uint64(7 * k)
    return values.view(np.int64), counts
