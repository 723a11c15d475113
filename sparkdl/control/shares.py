"""Which files and rows of a Parquet data set a node reads, as it is told in a control message.

Runs in: anywhere
"""

from __future__ import annotations

from typing import Any

import msgspec


class Storage(msgspec.Struct, frozen=True):
    """A file system: scheme and authority as in `s3://bucket`, and how to open it.

    `options` may hold credentials, so that they are not shown.
    """

    uri: str
    options: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"Storage({self.uri!r}, options of {sorted(self.options)})"


class DataFile(msgspec.Struct, frozen=True, array_like=True):
    """A Parquet file.

    Attributes:
        path: within the storage.
        row_nbytes: about how many bytes a row of the wanted columns has in memory.
        values: of the partition columns, as the folders spell them; None is null.
    """

    path: str
    row_nbytes: int
    values: tuple[str | None, ...] = ()


class FileRange(msgspec.Struct, frozen=True, array_like=True):
    """Rows [`start`, `stop`) of row group `row_group` of file number `file` of a `Share`.

    Attributes:
        first: the number of row `start` among the rows of all files of the data set.
    """

    file: int
    row_group: int
    start: int
    stop: int
    first: int = 0


class Share(msgspec.Struct, frozen=True):
    """What one node reads, in order.

    Attributes:
        schema: of every batch, as `pyarrow.Schema.serialize` writes it.
        partitions: those of its columns whose values are in `DataFile.values`, in that order.
        ranges: `file` is an index into `files`.
    """

    storage: Storage
    schema: bytes
    partitions: tuple[str, ...]
    files: tuple[DataFile, ...]
    ranges: tuple[FileRange, ...]

    @property
    def num_rows(self) -> int:
        """How many rows that are."""
        return sum(part.stop - part.start for part in self.ranges)
