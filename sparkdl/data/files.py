"""The files of a data set and the options that they are read and written with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from sparkdl.control.rows import Storage
from sparkdl.core.errors import ConfigError, ReadError
from sparkdl.data.framing import (
    AUTO,
    CHUNK_NBYTES,
    HEAD_NBYTES,
    SUFFIXES,
    Chunk,
    Inflated,
    Readable,
    compression_of,
    read_chunks,
)
from sparkdl.storage.parquet.source import partition_fields
from sparkdl.storage.systems import find_files, locate, open_storage

_NAMES = ("path", "paths", "compression", "inferRecords", "storageOptions")


@dataclass(frozen=True)
class Options:
    """The user's options for reading and writing files.

    Attributes:
        compression: `auto`, `none` or `gzip`.
        infer_records: how many records of each file to infer a schema from, from its start; None
            means all.
        storage: keyword arguments of the storage's class in `pyarrow.fs`. They may hold
            credentials, so that they are not shown.
    """

    paths: tuple[str, ...]
    compression: str = AUTO
    infer_records: int | None = None
    storage: Mapping[str, Any] = field(default_factory=dict, repr=False)


def options_of(options: Mapping[str, str]) -> Options:
    """Return the options of `spark.read` and `df.write`; their names may be in any case.

    Raises:
        ConfigError: for an unknown option, or an invalid value.
    """
    known = {name.lower(): name for name in _NAMES}
    given = {key.lower(): value for key, value in options.items()}
    for key in given.keys() - known.keys():
        raise ConfigError(f"there is no option {key!r}; choose one of {', '.join(_NAMES)}")
    paths = _json(given, "paths", list) if "paths" in given else [given.get("path", "")]
    if not all(paths) or not paths:
        raise ConfigError('no path was given: load("folder"), or save("folder")')
    compression = given.get("compression", AUTO).lower()
    if compression not in (AUTO, *SUFFIXES):
        raise ConfigError(
            f"compression={compression!r} must be one of {', '.join((AUTO, *SUFFIXES))}"
        )
    storage = _json(given, "storageoptions", dict) if "storageoptions" in given else {}
    limit = given.get("inferrecords", "all")
    if limit != "all" and not (limit.isdigit() and int(limit)):
        raise ConfigError(f"inferRecords={limit!r} must be a number above 0, or 'all'")
    count = None if limit == "all" else int(limit)
    return Options(tuple(paths), compression, count, storage)


def _json(given: Mapping[str, str], name: str, kind: type) -> Any:
    try:
        value = json.loads(given[name])
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be a JSON {'object' if kind is dict else 'array'}")
    return value


@dataclass(frozen=True)
class DataFile:
    """A file.

    Attributes:
        path: within the storage.
        values: of the partition columns, as the folders spell them; None is null.
    """

    path: str
    values: Mapping[str, str | None]


@dataclass(frozen=True)
class DataSet:
    """Files, sorted by their paths.

    Attributes:
        partitions: the columns whose values are in the names of folders.
    """

    storage: Storage
    files: tuple[DataFile, ...]
    partitions: pa.Schema


def find(options: Options) -> DataSet:
    """List the files that the paths mean, see `sparkdl.storage.systems.find_files`.

    Raises:
        ConfigError: if a path is not there or cannot be listed, paths are in different storages,
            or files lie in folders with different partition columns.
    """
    located = [locate(path, dict(options.storage)) for path in options.paths]
    storage = located[0][0]
    if any(other.uri != storage.uri for other, _ in located):
        raise ConfigError(
            f"{', '.join(options.paths)} are in different storages; load them one by one"
        )
    system = open_storage(storage)
    # By path, because two patterns may find the same file, which counts once.
    found: dict[str, Mapping[str, str | None]] = {}
    for asked, (_, path) in zip(options.paths, located, strict=True):
        here = dict(find_files(system, path))
        if not here and not _is_folder(system, path):
            raise ConfigError(
                f"{asked}: there is no such file or folder. Give a path that the driver and all "
                "executors reach"
            )
        found.update(here)
    files = tuple(DataFile(path, values) for path, values in sorted(found.items()))
    return DataSet(storage, files, partition_fields(found) if found else pa.schema([]))


def _is_folder(system: pafs.FileSystem, path: str) -> bool:
    return bool(system.get_file_info(path).type == pafs.FileType.Directory)


def read_file(
    storage: Storage, path: str, compression: str = AUTO, nbytes: int = CHUNK_NBYTES
) -> Iterator[Chunk]:
    """Yield the records of a file, checksums verified.

    Args:
        compression: `auto` goes by the file's first bytes.
        nbytes: about how much is read at a time.

    Raises:
        ConfigError: if the storage cannot be opened here.
        RecordError: if the file is damaged or ends within a record.
        ReadError: if it cannot be read.
    """
    system = open_storage(storage)
    try:
        with system.open_input_file(path) as stream:
            if compression == AUTO:
                compression = compression_of(stream.read(HEAD_NBYTES))
                stream.seek(0)
            source: Readable = stream
            if SUFFIXES[compression]:
                source = Inflated(stream, path)
            yield from read_chunks(source, path, nbytes)
    except (OSError, pa.ArrowException) as error:
        raise ReadError(
            f"{path} cannot be read: {error}. Is it on a storage that all executors reach, and "
            "still there?"
        ) from error
