"""TFRecord files: records one after another, each with its length and two checksums.

    uint64 length | uint32 masked CRC-32C of the length | data | uint32 masked CRC-32C of the data

All numbers are little-endian. Whole files may be compressed with gzip, as TensorFlow does.
https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
https://www.tensorflow.org/api_docs/python/tf/io/TFRecordOptions
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import google_crc32c
import pyarrow as pa

from sparkdl.core.errors import RecordError

CHUNK_NBYTES = 4 * 1024 * 1024
_READ_NBYTES = 64 * 1024 * 1024
"""The largest read, so that memory grows with the data in a file, not with a length it claims."""
HEAD_NBYTES = 12
_LENGTH, _FOOT = struct.Struct("<Q"), struct.Struct("<I")
# TensorFlow's kMaskDelta (tensorflow/core/lib/hash/crc32c.h).
_MASK_DELTA = 0xA282EAD8

AUTO = "auto"
NONE = "none"
GZIP = "gzip"
SUFFIXES = {NONE: "", GZIP: ".gz"}


class Readable(Protocol):
    """A stream to read records from."""

    def read(self, nbytes: int, /) -> bytes:
        """Return up to `nbytes` bytes; none at the end."""


@dataclass(frozen=True)
class Chunk:
    """Records that were read together.

    Attributes:
        places: of each record in the file, in bytes; counted decompressed if it is compressed.
    """

    path: str
    records: Sequence[bytes]
    places: Sequence[int]

    def error(self, record: int, reason: str) -> RecordError:
        """Return the error that says where record number `record` of this chunk is."""
        return RecordError(self.path, self.places[record], reason)


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
        records, places, stop, needed = _walk(data, path, offset)
        if records:
            yield Chunk(path, records, places)
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


def _walk(data: bytes, path: str, offset: int) -> tuple[list[bytes], list[int], int, int]:
    """Return the whole records and their places, where the last one ends, what the next needs."""
    records: list[bytes] = []
    places: list[int] = []
    at, needed = 0, HEAD_NBYTES + _FOOT.size
    while at + HEAD_NBYTES <= len(data):
        if not is_head(data[at : at + HEAD_NBYTES]):
            raise RecordError(path, offset + at, _wrong_checksum("length", offset + at == 0))
        stop = at + HEAD_NBYTES + _LENGTH.unpack_from(data, at)[0]
        if stop + _FOOT.size > len(data):
            needed = stop + _FOOT.size - at
            break
        record = data[at + HEAD_NBYTES : stop]
        if data[stop : stop + _FOOT.size] != _masked(record):
            raise RecordError(path, offset + at, _wrong_checksum("data", offset + at == 0))
        records.append(record)
        places.append(offset + at)
        at = stop + _FOOT.size
    return records, places, at, needed


def _wrong_checksum(what: str, is_first: bool) -> str:
    # A file of another kind fails at its first record, as a damaged one may: it gets a hint.
    hint = " Is it a TFRecord file, and compressed as the option `compression` says?"
    return f"the checksum of the record's {what} is wrong: the file is damaged.{hint * is_first}"


def is_head(head: bytes) -> bool:
    """Return whether these 12 bytes are the head of a record: a length and its checksum."""
    return head[8:] == _masked(head[:8])


def frame(records: Iterable[bytes]) -> bytes:
    """Return the bytes of a file that holds these records and no others."""
    parts: list[bytes] = []
    for record in records:
        length = _LENGTH.pack(len(record))
        parts += (length, _masked(length), record, _masked(record))
    return b"".join(parts)


def _masked(data: bytes) -> bytes:
    """Return the checksum as it is stored, so that none is that of data with checksums in it."""
    found = google_crc32c.value(data)
    return _FOOT.pack(((found >> 15 | found << 17) + _MASK_DELTA) & 0xFFFFFFFF)


def compression_of(head: bytes) -> str:
    """Return how a file is compressed, by its first `HEAD_NBYTES` bytes.

    A file that begins with a length and its checksum is not compressed, whatever its name is.
    """
    if len(head) == HEAD_NBYTES and is_head(head):
        return NONE
    return GZIP if head.startswith(b"\x1f\x8b") else NONE


class Inflated:
    """A stream compressed with gzip, which `read` decompresses.

    Args:
        path: for messages.
    """

    def __init__(self, stream: Readable, path: str) -> None:
        self._stream = pa.CompressedInputStream(stream, "gzip")
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
