"""TFRecord files: records one after another, each with its length and two checksums.

Runs in: driver, feeder

    uint64 length | uint32 masked CRC-32C of the length | data | uint32 masked CRC-32C of the data

All numbers are little-endian. Whole files may be compressed with gzip or zlib, as TensorFlow does.
https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
https://www.tensorflow.org/api_docs/python/tf/io/TFRecordOptions
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkdl.core.errors import RecordError
from sparkdl.data.wire import Bytes, Ints, contents, from_contents, join

CHUNK_NBYTES = 4 * 1024 * 1024
_READ_NBYTES = 64 * 1024 * 1024
"""The largest read, so that memory grows with the data in a file, not with a length it claims."""
HEAD_NBYTES = 12
_FOOT_NBYTES = 4
_LENGTH = struct.Struct("<Q")
# TensorFlow's kMaskDelta (tensorflow/core/lib/hash/crc32c.h).
_MASK_DELTA = np.uint32(0xA282EAD8)

Checksums = npt.NDArray[np.uint32]
AUTO = "auto"
NONE = "none"
GZIP = "gzip"
ZLIB = "zlib"
SUFFIXES = {NONE: "", GZIP: ".gz", ZLIB: ".zlib"}
# zlib takes 16 more for gzip's header and trailer instead of its own.
_WINDOW_BITS = {GZIP: 16 + zlib.MAX_WBITS, ZLIB: zlib.MAX_WBITS}


class Readable(Protocol):
    """A stream to read records from."""

    def read(self, nbytes: int, /) -> bytes:
        """Return up to `nbytes` bytes; none at the end."""


@dataclass(frozen=True)
class Chunk:
    """Records that were read together.

    Attributes:
        data: all bytes, those between the records among them.
        starts: of each record in `data`, as are `ends`.
        places: of each record in the file, in bytes; counted decompressed if it is compressed.
    """

    path: str
    data: Bytes
    starts: Ints
    ends: Ints
    places: Ints

    def error(self, record: int, reason: str) -> RecordError:
        """Return the error that says where record number `record` of this chunk is."""
        return RecordError(self.path, int(self.places[record]), reason)


def read_chunks(stream: Readable, path: str, nbytes: int = CHUNK_NBYTES) -> Iterator[Chunk]:
    """Yield all records, checksums verified.

    Args:
        path: for messages.
        nbytes: about how much is read at a time; a longer record comes alone.

    Raises:
        RecordError: if a checksum is wrong, or the file ends within a record.
    """
    rest, offset, wanted = b"", 0, nbytes
    while True:
        data, is_end = _fill(stream, rest, wanted)
        positions, stop, needed = _walk(data, path, offset)
        if len(positions):
            starts = positions + HEAD_NBYTES
            ends = np.append(positions[1:], stop) - _FOOT_NBYTES
            yield Chunk(path, np.frombuffer(data, np.uint8), starts, ends, offset + positions)
        rest, offset = data[stop:], offset + stop
        if is_end:
            if rest:
                raise RecordError(
                    path,
                    offset,
                    f"the file ends within a record: {len(rest)} bytes of at least {needed}. "
                    "Was it copied whole, and had its writer closed it?",
                )
            return
        # A record that is longer than a chunk needs a longer read.
        wanted = max(nbytes, needed)


def _fill(stream: Readable, rest: bytes, wanted: int) -> tuple[bytes, bool]:
    """Return `rest` and what follows it, `wanted` bytes in all, or all there is."""
    pieces, missing = [rest], wanted - len(rest)
    while missing > 0:
        piece = stream.read(min(missing, _READ_NBYTES))
        if not piece:
            return b"".join(pieces), True
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces), False


def _walk(data: bytes, path: str, offset: int) -> tuple[Ints, int, int]:
    """Return where each whole record is, where the last one ends, what the next one needs."""
    size, checksum, length_at = len(data), _checksum, _LENGTH.unpack_from
    positions: list[int] = []
    computed: list[int] = []  # of length and data of each record
    at, needed = 0, HEAD_NBYTES + _FOOT_NBYTES
    while at + HEAD_NBYTES <= size:
        stop = at + HEAD_NBYTES + length_at(data, at)[0]
        if stop + _FOOT_NBYTES > size:
            needed = stop + _FOOT_NBYTES - at
            break
        positions.append(at)
        # Only computed here: numpy masks and compares the sums of all records at once.
        computed.append(checksum(data[at : at + 8]))
        computed.append(checksum(data[at + HEAD_NBYTES : stop]))
        at = stop + _FOOT_NBYTES
    found = np.array(positions, np.int64)
    if positions:
        heads, feet = found + 8, np.append(found[1:], at) - _FOOT_NBYTES
        stored = _stored(np.frombuffer(data, np.uint8), np.stack([heads, feet], axis=1).ravel())
        wrong = np.flatnonzero(stored != _masked(np.array(computed, np.uint32)))
        if len(wrong):
            record, of_data = divmod(int(wrong[0]), 2)
            what = "data" if of_data else "length"
            place = offset + positions[record]
            # A file of another kind fails at its first record, as a damaged one may: it gets a
            # hint.
            raise RecordError(path, place, _wrong_checksum(what, place == 0))
    if at + HEAD_NBYTES <= size:  # a length that leads beyond `data` must be true
        head = data[at : at + HEAD_NBYTES]
        if not is_head(head):
            raise RecordError(path, offset + at, _wrong_checksum("length", offset + at == 0))
    return found, at, needed


def _wrong_checksum(what: str, is_first: bool) -> str:
    hint = " Is it a TFRecord file, and compressed as the option `compression` says?"
    return f"the checksum of the record's {what} is wrong: the file is damaged.{hint * is_first}"


def is_head(head: bytes) -> bool:
    """Return whether these 12 bytes are the head of a record: a length and its checksum."""
    stored = np.frombuffer(head[8:HEAD_NBYTES], np.uint32)
    return bool((stored == _masked(np.array([_checksum(head[:8])], np.uint32))).all())


def frame(records: pa.LargeBinaryArray) -> pa.Buffer:
    """Return the bytes of a file that holds these records and no others."""
    offsets, data = contents(records)
    lengths, count = np.diff(offsets).astype("<u8"), len(records)
    heads = np.empty((count, HEAD_NBYTES), np.uint8)
    heads[:, :8] = lengths.view(np.uint8).reshape(-1, 8)
    heads[:, 8:] = _as_bytes(_each(lengths.view(np.uint8), np.arange(0, 8 * count + 1, 8)))
    feet = _as_bytes(_each(data, offsets))
    parts = [
        from_contents(np.arange(0, heads.size + 1, HEAD_NBYTES), heads.ravel()),
        records,
        from_contents(np.arange(0, feet.size + 1, _FOOT_NBYTES), feet.ravel()),
    ]
    return pa.py_buffer(contents(join(parts))[1])


def _each(data: Bytes, offsets: Ints) -> Checksums:
    """Return the masked checksums of the parts of `data` that the n + 1 offsets make."""
    whole, ends = data.tobytes(), offsets.tolist()
    sums = [_checksum(whole[a:b]) for a, b in pairwise(ends)]
    return _masked(np.array(sums, np.uint32))


def _as_bytes(sums: Checksums) -> Bytes:
    return sums.astype("<u4").view(np.uint8).reshape(-1, 4)


def _stored(data: Bytes, at: Ints) -> Checksums:
    """Return the 32-bit numbers at any places, aligned or not."""
    stored: Checksums = np.ascontiguousarray(data[at[:, None] + np.arange(4)]).view("<u4").ravel()
    return stored


def _masked(sums: Checksums) -> Checksums:
    """Return checksums as they are stored, so that no file's checksum is that of its checksums."""
    masked: Checksums = (sums >> np.uint32(15) | sums << np.uint32(17)) + _MASK_DELTA
    return masked


_checksum = google_crc32c.value


def compression_of(head: bytes) -> str:
    """Return how a file is compressed, by its first `HEAD_NBYTES` bytes.

    A file that begins with a length and its checksum is not compressed, whatever its name is.
    """
    if len(head) == HEAD_NBYTES and is_head(head):
        return NONE
    if head.startswith(b"\x1f\x8b"):
        return GZIP
    # RFC 1950: the low bits name deflate, and both bytes are a multiple of 31.
    is_zlib = len(head) > 1 and head[0] & 0x0F == 8 and int.from_bytes(head[:2], "big") % 31 == 0
    return ZLIB if is_zlib else NONE


class Inflated:
    """A stream compressed with gzip or zlib, which `read` decompresses.

    Args:
        path: for messages.
    """

    def __init__(self, stream: Readable, path: str) -> None:
        self._stream = pa.CompressedInputStream(stream, "gzip")  # which takes zlib's as well
        self._path = path
        self._offset = 0

    def read(self, nbytes: int, /) -> bytes:
        """Return up to `nbytes` bytes; none at the end.

        Raises:
            RecordError: if it is damaged or ends too early.
        """
        try:
            data: bytes = self._stream.read(nbytes)
        except OSError as error:
            raise RecordError(
                self._path,
                self._offset,
                f"it cannot be decompressed (bytes are counted decompressed): {error}. Was it "
                "copied whole, and had its writer closed it?",
            ) from error
        self._offset += len(data)
        return data


class Deflater:
    """A sink that compresses the written bytes, or passes them on unchanged."""

    def __init__(self, sink: Any, compression: str) -> None:
        self._sink = sink
        bits = _WINDOW_BITS.get(compression)
        self._engine: Any = bits and zlib.compressobj(wbits=bits)

    def write(self, data: Any) -> None:
        """Write a buffer."""
        self._sink.write(self._engine.compress(data) if self._engine else data)

    def finish(self) -> None:
        """Write the remaining bytes; the sink stays open."""
        if self._engine:
            self._sink.write(self._engine.flush())
