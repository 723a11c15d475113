"""Files that a node leaves for the driver, in pieces, by its agent's Flight server.

Runs in: driver, child, agent
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Annotated

import msgspec
import pyarrow as pa

from sparkdl.feed.transfer.messages import Count, result_batch

PIECE_NBYTES = 4 * 1024 * 1024


class FilePiece(msgspec.Struct, frozen=True, tag="file"):
    """The ticket of `DoGet` for bytes of a file, from `offset` on."""

    name: Annotated[str, msgspec.Meta(pattern=r"\A[\w-]+(\.\w+)?\Z", max_length=255)]
    offset: Count


class SentFile(msgspec.Struct, frozen=True):
    """A file in the node's folder `files.LEFT`, as the result of `map_fun` names it."""

    name: str
    nbytes: int
    sha256: str


def digest_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(PIECE_NBYTES):
            digest.update(data)
    return digest.hexdigest()


def read_piece(folder: Path, piece: FilePiece) -> pa.RecordBatch:
    with (folder / piece.name).open("rb") as file:
        return result_batch(os.pread(file.fileno(), PIECE_NBYTES, piece.offset))
