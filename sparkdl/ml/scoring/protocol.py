"""The calls between tasks and the scorer of their executor: Arrow Flight over a Unix socket.

`DoExchange` without a command lasts as long as a task: a scorer with such a call is in use. Each
piece of a task's rows is a `DoExchange` of its own, with a `Piece` as the command: a batch in, and
a batch or a `Failed` back. The action `leave` asks a scorer to end for another.

A scorer holds its name as that of an abstract socket: the kernel gives the name to one process, and
takes it back when that ends, however it ends (unix(7)). The socket of Flight is a file that only
its user may connect to.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import msgspec
import psutil
import pyarrow as pa

from sparkdl.ml.scoring.columns import OutputColumn, type_decoded, type_encoded
from sparkdl.ml.scoring.source import ModelSource
from sparkdl.values.columns import convert
from sparkdl.values.ndarrays import Array, nest

LEAVE = "leave"
_PREFIX = "sparkdl-scorer-"
# Not TMPDIR, which may be too long for a socket's path: on YARN it is.
_FOLDER = Path("/tmp")


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


class Welcome(msgspec.Struct, frozen=True):
    """The scorer's process, and the number that it gives to the task."""

    pid: int
    task: int


class Piece(msgspec.Struct, frozen=True):
    """What to do with a batch.

    Attributes:
        task: see `Welcome`.
        outputs: the columns of the answer.
    """

    task: int
    batch_size: int
    outputs: tuple[OutputColumn, ...]


class Failed(msgspec.Struct, frozen=True):
    """The model failed on the rows from `start` to before `stop`; on none: it was not loaded."""

    text: str
    start: int = 0
    stop: int = 0


encode_piece = msgspec.msgpack.Encoder(enc_hook=type_encoded).encode
decode_piece = msgspec.msgpack.Decoder(Piece, dec_hook=type_decoded).decode


def name_of(executor: int, device: str, source: ModelSource) -> str:
    """Return the name of the scorer for a model on a device of an executor, a process."""
    # With its start time, because the number of a process is used again.
    where = _digest(os.geteuid(), executor, psutil.Process(executor).create_time(), device)
    model = _digest(*(getattr(source, each.name) for each in fields(source) if each.compare))
    return f"{_PREFIX}{where}-{model}"


def claim(name: str) -> socket.socket | None:
    """Return a socket that holds a scorer's name until it is closed; None if a scorer holds it."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(f"\0{name}")
    except OSError as error:
        sock.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return sock


def path_of(name: str) -> Path:
    """Return the file of a scorer's socket."""
    return _FOLDER / name


def uri_of(name: str) -> str:
    """Return the address of a scorer."""
    return f"grpc+unix://{path_of(name)}"


def siblings(name: str) -> Iterator[str]:
    """Yield the names of other scorers of the same executor and device that run.

    Delete the sockets of all scorers of this user that were killed.
    """
    for path in _FOLDER.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if path.name == name or path.lstat().st_uid != os.geteuid():
                continue
            if (free := claim(path.name)) is not None:
                with free:
                    path.unlink()
            elif path.name.startswith(name.rpartition("-")[0] + "-"):
                yield path.name


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def inputs_batch(values: Mapping[str, Array], given: Mapping[str, pa.Array]) -> pa.RecordBatch:
    """Return a piece as it travels.

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
    return pa.RecordBatch.from_arrays(columns, list(values))


def inputs_of(batch: pa.RecordBatch) -> dict[str, Array]:
    """Return a piece's inputs, by name, as `inputs_batch` was given them."""
    return {
        field.name: convert(column, None, f"column {field.name!r}")
        for field, column in zip(batch.schema, batch.columns, strict=True)
    }
