"""TFRecord files: which there are, and their records, one after another.

    uint64 length | uint32 masked CRC-32C of the length | data | uint32 masked CRC-32C of the data

All numbers are little-endian. Compressed files are not read: their first record is refused.
https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import google_crc32c
import pyarrow as pa
import pyarrow.fs as pafs

from sparkdl.control.rows import Storage
from sparkdl.core.errors import ConfigError, ReadError, RecordError
from sparkdl.storage.systems import find_files, locate, open_storage

_CHUNK_NBYTES = 4 * 1024 * 1024
_READ_NBYTES = 64 * 1024 * 1024
"""The largest read, so that memory grows with the data in a file, not with a length it claims."""
_HEAD_NBYTES = 12
_LENGTH, _FOOT = struct.Struct("<Q"), struct.Struct("<I")
# TensorFlow's kMaskDelta (tensorflow/core/lib/hash/crc32c.h).
_MASK_DELTA = 0xA282EAD8


class Readable(Protocol):
    def read(self, nbytes: int, /) -> bytes:
        """Return up to `nbytes` bytes; none at the end."""


@dataclass(frozen=True)
class Chunk:
    """Records that were read together, and the place of each in the file, in bytes."""

    path: str
    records: Sequence[bytes]
    places: Sequence[int]

    def error(self, record: int, reason: str) -> RecordError:
        return RecordError(self.path, self.places[record], reason)


def find(paths: Sequence[str], options: Mapping[str, Any]) -> tuple[Storage, list[str]]:
    """Return the storage of the files that the paths mean, and their sorted paths within it."""
    if not paths or not all(paths):
        raise ConfigError(f"path={list(paths)}: must name folders, files or patterns")
    located = [locate(path, dict(options)) for path in paths]
    storage = located[0][0]
    if any(other.uri != storage.uri for other, _ in located):
        raise ConfigError(f"{', '.join(paths)} are in different storages; load them one by one")
    system = open_storage(storage)
    # A set, because two patterns may find the same file, which counts once.
    found: set[str] = set()
    for asked, (_, path) in zip(paths, located, strict=True):
        here = list(find_files(system, path))
        if not here and system.get_file_info(path).type != pafs.FileType.Directory:
            raise ConfigError(
                f"{asked}: there is no such file or folder. Give a path that the driver and all "
                "executors reach"
            )
        found.update(here)
    return storage, sorted(found)


def read_file(storage: Storage, path: str, nbytes: int = _CHUNK_NBYTES) -> Iterator[Chunk]:
    """Yield the records of a file, checksums verified; about `nbytes` are read at a time."""
    try:
        with open_storage(storage).open_input_file(path) as stream:
            yield from read_chunks(stream, path, nbytes)
    except (OSError, pa.ArrowException) as error:
        raise ReadError(
            f"{path} cannot be read: {error}. Check that it still exists, on a storage that all "
            "executors reach"
        ) from error


def read_chunks(stream: Readable, path: str, nbytes: int) -> Iterator[Chunk]:
    """Yield the records of a stream; see `read_file`."""
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
                    f"the file ends within a record: {len(rest)} bytes of at least {needed}. Copy "
                    "it again, or write it again and close the writer",
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
    at, needed = 0, _HEAD_NBYTES + _FOOT.size
    while at + _HEAD_NBYTES <= len(data):
        if data[at + 8 : at + _HEAD_NBYTES] != _masked(data[at : at + 8]):
            raise RecordError(path, offset + at, _wrong_checksum("length", offset + at == 0))
        stop = at + _HEAD_NBYTES + _LENGTH.unpack_from(data, at)[0]
        if stop + _FOOT.size > len(data):
            needed = stop + _FOOT.size - at
            break
        record = data[at + _HEAD_NBYTES : stop]
        if data[stop : stop + _FOOT.size] != _masked(record):
            raise RecordError(path, offset + at, _wrong_checksum("data", offset + at == 0))
        records.append(record)
        places.append(offset + at)
        at = stop + _FOOT.size
    return records, places, at, needed


def _wrong_checksum(what: str, is_first: bool) -> str:
    # A file of another kind fails at its first record, as a damaged one may: it gets a hint.
    hint = " It must be an uncompressed TFRecord file: decompress it first, for example with gunzip"
    return f"the checksum of the record's {what} is wrong: the file is damaged.{hint * is_first}"


def frame(records: Iterable[bytes]) -> bytes:
    parts: list[bytes] = []
    for record in records:
        length = _LENGTH.pack(len(record))
        parts += (length, _masked(length), record, _masked(record))
    return b"".join(parts)


def _masked(data: bytes) -> bytes:
    """Return the checksum as it is stored, so that none is that of data with checksums in it."""
    found = google_crc32c.value(data)
    return _FOOT.pack(((found >> 15 | found << 17) + _MASK_DELTA) & 0xFFFFFFFF)
