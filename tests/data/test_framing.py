"""Records are read back as written; what is damaged or cut short is found, with its place."""

from __future__ import annotations

import gzip
import io
import pickle
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from sparkdl.core.errors import RecordError
from sparkdl.data import framing
from tests.data.records import framed

RECORDS = st.lists(st.binary(max_size=100), max_size=20)
CHECK = 0xE3069283  # the CRC-32C of "123456789", as RFC 3720 has it


class Dripping(io.BytesIO):
    """Gives fewer bytes than it is asked for, as sockets do."""

    def read(self, nbytes: int | None = -1, /) -> bytes:
        return super().read(min(nbytes or 1, 7))


def read(
    data: bytes, nbytes: int = 64, stream: Callable[[bytes], framing.Readable] = io.BytesIO
) -> list[bytes]:
    return [
        record
        for chunk in framing.read_chunks(stream(data), "file", nbytes)
        for record in chunk.records
    ]


def places(records: list[bytes]) -> list[int]:
    """Return where each record begins, and where the file ends."""
    found = [0]
    for record in records:
        found.append(found[-1] + len(record) + 16)
    return found


@given(RECORDS, st.integers(1, 300))
def test_records_are_read_as_written(records: list[bytes], nbytes: int) -> None:
    data = framed(records)
    assert read(data, nbytes) == records
    assert read(data, nbytes, Dripping) == records
    chunks = framing.read_chunks(io.BytesIO(data), "f", nbytes)
    found = [place for chunk in chunks for place in chunk.places]
    assert [*found, len(data)] == places(records)


@given(RECORDS.filter(len), st.data(), st.integers(1, 300))
def test_flipped_bit_is_found_there(records: list[bytes], data: st.DataObject, nbytes: int) -> None:
    good = bytearray(framed(records))
    at = data.draw(st.integers(0, len(good) - 1))
    good[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(RecordError, match="checksum") as caught:
        read(bytes(good), nbytes)
    starts = places(records)
    assert caught.value.offset == max(start for start in starts[:-1] if start <= at)
    assert str(caught.value).startswith(f"file, byte {caught.value.offset}: ")
    again = pickle.loads(pickle.dumps(caught.value))  # noqa: TID251 (our own)
    assert (again.path, again.offset) == ("file", caught.value.offset)
    assert str(again) == str(caught.value)


@given(RECORDS.filter(len), st.data(), st.integers(1, 300))
def test_file_cut_short_is_found(records: list[bytes], data: st.DataObject, nbytes: int) -> None:
    good = framed(records)
    size = data.draw(st.integers(0, len(good) - 1))
    starts = places(records)
    if size in starts:
        assert read(good[:size], nbytes) == records[: starts.index(size)]
        return
    with pytest.raises(RecordError, match="ends within a record") as caught:
        read(good[:size], nbytes)
    assert caught.value.offset == max(start for start in starts if start < size)


def test_checksums_are_masked_crc_32c() -> None:
    data = framed([b"123456789"])
    masked = ((CHECK >> 15 | CHECK << 17) + 0xA282EAD8) & 0xFFFFFFFF
    assert data[:8] == (9).to_bytes(8, "little")
    assert data[12:-4] == b"123456789"
    assert data[-4:] == masked.to_bytes(4, "little")


def test_a_length_that_is_wrong_makes_no_one_wait_for_so_many_bytes() -> None:
    data = bytearray(framed([b"a"]))
    data[7] = 0x40  # some exabytes
    with pytest.raises(RecordError, match="length is wrong"):
        read(bytes(data))


@pytest.mark.parametrize(
    "data", [b"PAR1" + bytes(100), gzip.compress(framed([b"a"]), mtime=0)], ids=["parquet", "gzip"]
)
def test_what_is_no_plain_tfrecord_file_is_called_so(data: bytes) -> None:
    with pytest.raises(RecordError, match="It must be an uncompressed TFRecord file"):
        read(data)
