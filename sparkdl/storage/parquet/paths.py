"""Parquet files as users name them: a path, a pattern, several of them, with options or without."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from sparkdl.core.errors import ConfigError

Paths = str | PurePath | Sequence[str | PurePath]


@dataclass(frozen=True)
class ParquetPaths:
    """Parquet files to read; none has been opened yet. Made by `sparkdl.parquet`.

    Attributes:
        paths: folders, files or patterns.
        columns: which columns, in this order; `None` for all.
        options: how to open the storage. They may hold credentials, so that they are not shown.
    """

    paths: tuple[str, ...]
    columns: tuple[str, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)


def parquet(
    paths: Paths, columns: Sequence[str] | None = None, options: Mapping[str, Any] | None = None
) -> ParquetPaths:
    """Return Parquet files, for `cluster.feed` and `train`, and for `feed=` of `ctx.batches`.

    Args:
        paths: a folder, a file, a pattern, or a list of these: local paths, which the driver and
            all nodes must have, or URLs of `hdfs`, `s3`, `gs`, `abfs`. A path without a scheme is
            on Hadoop's default file system. Keys of `key=value` folders do not become columns.
        columns: which columns, in this order; all by default.
        options: arguments of the storage's class in `pyarrow.fs`, such as `region` and
            `endpoint_override` of S3. Without them each node finds its own credentials.

    Raises:
        ConfigError: if `paths` is no path, or `columns` is no list of names.
    """
    named = _named(paths)
    if not named:
        raise ConfigError(f"paths={paths!r} must be a path or a list of paths")
    # A text is a sequence, too: of its letters.
    if isinstance(columns, str):
        raise ConfigError(f"columns={columns!r} must be a list of names")
    names = None if columns is None else tuple(columns)
    return ParquetPaths(named, names, dict(options or {}))


def parquet_paths(data: Any) -> ParquetPaths | None:
    """Return the files that `data` names, or `None` if it is something else."""
    if isinstance(data, ParquetPaths):
        return data
    named = _named(data)
    return ParquetPaths(named) if named else None


def _named(data: Any) -> tuple[str, ...]:
    if isinstance(data, (str, PurePath)):
        return (os.fspath(data),)
    is_list = isinstance(data, (list, tuple))
    if is_list and all(isinstance(path, (str, PurePath)) for path in data):
        return tuple(os.fspath(path) for path in data)
    return ()
