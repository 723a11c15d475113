"""No bytes make a decoder raise anything but its typed error, or take memory that they announce."""

from __future__ import annotations

import io
import resource
import struct
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from sparkdl.control import channel, messages
from sparkdl.control.rows import FeedCoverage
from sparkdl.control.values import decode_value, encode_value
from sparkdl.core.errors import ConfigError, ProtocolError, RecordError
from sparkdl.data.examples import Kind, columns_of, decode
from sparkdl.data.framing import frame, read_chunks
from sparkdl.data.infer import see
from sparkdl.node.checkpoint_store import CheckpointName, Manifest, decode_manifest
from tests.data.records import example
from tests.fuzz.inputs import SEED, altered, damaged, example_of, share

Inputs = Callable[[Sequence[bytes], int, str], Iterator[bytes]]


@dataclass(frozen=True)
class Target:
    """Takes inputs.

    Attributes:
        part: of all inputs, how many it gets.
        samples: valid inputs.
        take: raises only what is a bug; false if the input was refused.
    """

    name: str
    part: float
    samples: Sequence[bytes]
    take: Callable[[bytes], bool]
    inputs: Inputs = damaged


def _refuses(function: Callable[[bytes], object], *errors: type[Exception]) -> Any:
    def take(data: bytes) -> bool:
        try:
            function(data)
        except errors:
            return False
        return True

    return take


def _samples(union: Any) -> list[bytes]:
    return [msgspec.json.encode(example_of(kind)) for kind in typing.get_args(union)]


def _unframe(data: bytes) -> None:
    unframer = channel.Unframer()
    half = len(data) // 2
    for part in (data[:half], data[half:]):
        for message, _ in unframer.feed(part, [-1] * 3):
            channel.frame(message)
    assert len(unframer._buffer) <= len(data)


def _decode(decoder: Callable[[bytes], Any]) -> Callable[[bytes], None]:
    def decode_and_encode(data: bytes) -> None:
        messages.encode(decoder(data))  # what was taken is passed on, and written down

    return decode_and_encode


_VALUES: list[Any] = [
    None, 1.5, "x", b"x", [1, (2, {3}, frozenset({4})), 1j], {"a": np.arange(6).reshape(2, 3)},
    np.float32(1), np.array(["2020-01-01"], "M8[D]"), np.array(["ab"]), {1: {2: [True]}},
]  # fmt: skip

_COVERAGE = FeedCoverage(2, {2: {0: {0: ((0, 5), (7, 9))}}}, {})
_MANIFEST = Manifest(5, "abc", 1, 1.5, ("worker:0",), {"input": _COVERAGE}, {"a/b": 3})


def _checkpoint_name(data: bytes) -> None:
    found = CheckpointName.parse(data.decode(errors="replace"))
    assert found is None or str(found[0])


_FEATURES: dict[str, Any] = {
    "i": (Kind.INT64, [1, -1, 2**62]),
    "f": (Kind.FLOAT, [1.5, -2.0]),
    "b": (Kind.BYTES, [b"x", b"yz"]),
    "e": (Kind.INT64, []),
    "n": None,
}
_EXAMPLES = [example(_FEATURES), example({"i": (Kind.INT64, [3])}), b""]
_ELEMENTS = {"i": pa.int64(), "f": pa.float32(), "b": pa.binary(), "e": pa.int8(), "n": pa.string()}
_COLUMNS = columns_of(pa.schema([(n, pa.list_(t)) for n, t in _ELEMENTS.items()]))


def _file_of(records: Sequence[bytes]) -> bytes:
    return frame(records)


def _read(data: bytes) -> None:
    stream: Any = io.BytesIO(data)
    for chunk in read_chunks(stream, "here", nbytes=64):
        assert len(chunk.records) == len(chunk.places)
    if len(data) > 12:  # and with a length that is sealed, true or not
        head = data[:8]
        sealed = head + _masked(head) + data[12:]
        list(read_chunks(io.BytesIO(sealed), "here", nbytes=64))


def _masked(data: bytes) -> bytes:
    import google_crc32c

    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _records(data: bytes) -> None:
    (chunk,) = read_chunks(io.BytesIO(_file_of([*_EXAMPLES, data])), "here", 1 << 20)
    with suppress(RecordError):
        for column in decode(chunk, _COLUMNS):
            column.validate(full=True)
            assert len(column) == len(_EXAMPLES) + 1
    with suppress(RecordError, ConfigError):
        see([chunk])


TARGETS = [
    Target(
        "what agents say", 0.2, _samples(messages.FromAgent),
        _refuses(_decode(messages.decode_from_agent), ProtocolError), altered,
    ),
    Target(
        "what the coordinator says", 0.15, _samples(messages.ToAgent),
        _refuses(_decode(messages.decode_to_agent), ProtocolError), altered,
    ),
    Target(
        "what agents say, as text", 0.05, _samples(messages.FromAgent),
        _refuses(lambda data: messages.decode_from_agent(data.decode(errors="surrogateescape")),
                 ProtocolError), altered,
    ),
    Target(
        "the pipe to the child", 0.15,
        [channel.frame(example_of(kind)) * 2 for kind in typing.get_args(channel.Local)],
        _refuses(_unframe, ProtocolError),
    ),
    Target(
        "values", 0.1, [encode_value(v) for v in _VALUES], _refuses(decode_value, ProtocolError)
    ),
    Target("manifests", 0.08, [msgspec.json.encode(_MANIFEST)], _refuses(decode_manifest)),
    Target("names of checkpoints", 0.02, [b"step-0000000005-abc-1"], _refuses(_checkpoint_name)),
    Target("files of records", 0.15, [_file_of(_EXAMPLES)], _refuses(_read, RecordError)),
    Target("records", 0.01, _EXAMPLES[:2], _refuses(_records)),
]  # fmt: skip

_ROOM_NBYTES = 1 << 29


@contextmanager
def little_memory() -> Iterator[None]:
    """This process may take half a gigabyte more than it has: a length must not be believed."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + _ROOM_NBYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc")
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_any_input_is_taken_or_refused(target: Target) -> None:
    for sample in target.samples:
        assert target.take(sample), f"{sample!r} is valid, and was refused"
    with little_memory():
        for number, data in enumerate(
            target.inputs(target.samples, share(target.part), target.name)
        ):
            try:
                target.take(data)
            except Exception as error:
                what = f"FUZZ_SEED={SEED}, input {number} of {target.name!r}: {data!r}"
                raise AssertionError(what) from error
