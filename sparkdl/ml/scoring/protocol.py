"""The messages between tasks and the scorer of their executor, and the socket between them.

Runs in: feeder

They are connected by a Unix socket of packets with an abstract name (unix(7)): the kernel gives the
name to one process, and takes it back when that ends, however it ends. Both ends check the other's
user id. Rows and answers are segments: nameless files in memory, whose descriptors are sent.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pyarrow as pa

from sparkdl.control.descriptors import receive_with_fds
from sparkdl.core.errors import ProtocolError
from sparkdl.feed.store.segment import read_segment, write_segment
from sparkdl.ml.estimators.source import ModelSource
from sparkdl.ml.scoring.columns import OutputColumn, type_decoded, type_encoded
from sparkdl.values.columns import convert
from sparkdl.values.ndarrays import Array, nest

_PREFIX = "sparkdl-scorer-"
_NAMES = Path("/proc/net/unix")
_MAX_NBYTES = 1 << 20
# A packet goes out as a whole, so it must fit into the buffer.
_SEND_BUFFER = struct.pack("i", _MAX_NBYTES)


class Start(msgspec.Struct, frozen=True):
    """The configuration of a scorer, which it is started with.

    Attributes:
        owners: processes whose end is also the scorer's.
        cores: threads that the model may use.
        is_on_gpu: its CUDA_VISIBLE_DEVICES names one.
    """

    name: str
    source: ModelSource
    owners: tuple[int, ...]
    cores: int
    is_on_gpu: bool


class Join(msgspec.Struct, frozen=True, tag=True):
    """A task has rows.

    Attributes:
        outputs: the columns of its answers.
    """

    batch_size: int
    outputs: tuple[OutputColumn, ...]


class Rows(msgspec.Struct, frozen=True, tag=True):
    """A piece; its segment comes with it."""


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Another scorer wants the memory: end, unless tasks are there."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The scorer takes part; the file of its error stream comes with it."""


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The answer to the task's oldest piece; its segment comes with it."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The model failed.

    Attributes:
        number: of the task's piece; -1 for none: the model could not be loaded.
        start, stop: which rows of it.
    """

    text: str
    number: int = -1
    start: int = 0
    stop: int = 0


Message = Join | Rows | Leave | Welcome | Answer | Failed
_encode = msgspec.msgpack.Encoder(enc_hook=type_encoded).encode
_decode = msgspec.msgpack.Decoder(Message, dec_hook=type_decoded).decode


def new_socket() -> socket.socket:
    """Return a socket for packets of any message's size."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    return sock


def send(sock: socket.socket, message: Message, fd: int = -1) -> None:
    """Send a message at once, and the descriptor of a file that stays the caller's as well.

    Raises:
        OSError: if the other side is gone, or its socket's buffer is full.
    """
    # A task that does not read must not hold up the scorer, and so all other tasks.
    flags = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
    socket.send_fds(sock, [_encode(message)], [fd] if fd >= 0 else [], flags)


def receive(sock: socket.socket) -> tuple[Message | None, int]:
    """Wait for a message; return it, None at the end, and a descriptor, -1 if there is none.

    Raises:
        OSError, ProtocolError: if there can be no more messages.
    """
    data, fds = receive_with_fds(sock, _MAX_NBYTES, 1)
    fd = fds[0] if fds else -1
    if not data:
        return None, fd
    try:
        return _decode(data), fd
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"no message of a scorer's: {error}") from None


def name_of(executor: int, device: str, source: ModelSource) -> str:
    """Return the name of the scorer for a model on a device of an executor, a process."""
    # With its start time, because the number of a process is used again.
    where = _digest(os.geteuid(), executor, psutil.Process(executor).create_time(), device)
    model = _digest(*(getattr(source, each.name) for each in fields(source) if each.compare))
    return f"{_PREFIX}{where}-{model}"


def siblings(name: str) -> Iterator[str]:
    """Yield the names of other scorers of the same executor and device."""
    beginning = name.rpartition("-")[0] + "-"
    with suppress(OSError):
        for line in _NAMES.read_text().splitlines():
            # The kernel lists abstract names with an @ for the zero byte.
            found = line.rpartition("@")[2]
            if found.startswith(beginning) and found != name:
                yield found


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def write_inputs(values: Mapping[str, Array], given: Mapping[str, pa.Array]) -> int:
    """Write a piece; return the descriptor of its segment, which the caller owns.

    Args:
        values: the model's inputs, by name.
        given: their columns, without nulls; a column that is no plain array of numbers travels
            unconverted.
    """
    columns = []
    for name, array in values.items():
        if array.dtype.kind in "biuf" and array.dtype.isnative and 0 not in array.shape:
            columns.append(nest(array))
        else:
            columns.append(given[name])
    return write_segment(pa.RecordBatch.from_arrays(columns, list(values)))[0]


def read_inputs(fd: int) -> dict[str, Array]:
    """Return a piece's inputs, by name, as `write_inputs` was given them; closes `fd`."""
    batch = _read(fd)
    return {
        field.name: convert(column, None, f"column {field.name!r}")
        for field, column in zip(batch.schema, batch.columns, strict=True)
    }


def write_answer(columns: Sequence[pa.Array]) -> int:
    """Write an answer; return the descriptor of its segment, which the caller owns."""
    names = [str(place) for place in range(len(columns))]
    return write_segment(pa.RecordBatch.from_arrays(list(columns), names))[0]


def read_answer(fd: int) -> list[pa.Array]:
    """Return an answer's columns; closes `fd`."""
    return list(_read(fd).columns)


def _read(fd: int) -> Any:
    try:
        return read_segment(fd)  # the mapping lasts as long as the arrays
    finally:
        os.close(fd)
