"""Where files are: paths as users write them become a file system and the files in it.

Why not the discovery of `pyarrow.dataset`? It knows neither patterns nor Spark's rules about hidden
names and folders that count. TFRecord files are found here too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from sparkdl.control.rows import Storage
from sparkdl.core.errors import ConfigError

READ_NBYTES = 256 * 1024
"""Local files are read in pieces of this size for each column."""
_URI = re.compile(r"(?P<base>(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<host>[^/]*))(?P<path>.*)")
_ALIASES = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}
_SCHEMES = ("file", "hdfs", "viewfs", "s3", "gs", "abfs", "abfss")


def locate(path: str, options: dict[str, Any] | None = None) -> tuple[Storage, str]:
    """Return the storage that `path` is in, and the path within it. Connects to nothing.

    Args:
        path: a local path, absolute or not, or `file`, `hdfs`, `viewfs`, `s3` (`s3a`), `gs`,
            `abfs` or `abfss` with `://`; not URL-encoded.
        options: keyword arguments of the `pyarrow.fs` class of that scheme, such as `region` and
            `endpoint_override` for S3; they must be able to travel as JSON.
    """
    match = _URI.fullmatch(path)
    if not match:
        # With one slash, as in dbfs:/path, it is no local path either.
        scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/", path)
        if scheme and scheme[1] != "file":
            raise _unknown_scheme(scheme[1], path)
        local = path.removeprefix("file:")
        return Storage("file://", options or {}), os.path.abspath(local)
    scheme_name, host, rest = match["scheme"].lower(), match["host"], match["path"]
    scheme_name = _ALIASES.get(scheme_name, scheme_name)
    if scheme_name not in _SCHEMES:
        raise _unknown_scheme(scheme_name, path)
    if scheme_name == "file":
        return Storage("file://", options or {}), os.path.abspath(rest)
    if scheme_name in ("s3", "gs"):
        rest = f"{host.rpartition('@')[2]}/{rest.strip('/')}"
    elif scheme_name in ("abfs", "abfss") and "@" in host:
        rest = f"{host.partition('@')[0]}/{rest.strip('/')}"
    return Storage(f"{scheme_name}://{host}", options or {}), rest.rstrip("/") or "/"


def open_storage(storage: Storage) -> pafs.FileSystem:
    uri = urlsplit(storage.uri)
    options = dict(storage.options)
    try:
        if uri.scheme == "file":
            return pafs.LocalFileSystem(**options)
        if not options and (uri.netloc or uri.scheme != "hdfs"):
            # Arrow finds credentials by itself from a URI; only options need the class.
            return pafs.FileSystem.from_uri(f"{storage.uri}/")[0]
        if uri.scheme == "s3":
            return pafs.S3FileSystem(**options)
        if uri.scheme == "gs":
            return pafs.GcsFileSystem(**options)
        if uri.scheme in ("abfs", "abfss"):
            options.setdefault("account_name", (uri.hostname or "").split(".")[0])
            return pafs.AzureFileSystem(**options)
        return pafs.HadoopFileSystem(uri.hostname or "default", uri.port or 0, **options)
    except (OSError, TypeError, ValueError, AttributeError, pa.ArrowException) as e:
        raise ConfigError(
            f"{uri.scheme}://{uri.hostname or ''} cannot be opened with the storage options "
            f"{sorted(storage.options)}: {e}. Give those that pyarrow.fs takes for "
            f"{uri.scheme}:// as storage_options="
        ) from e


def open_file(
    system: pafs.FileSystem, path: str, footer: pq.FileMetaData | None = None
) -> pq.ParquetFile:
    """Open a Parquet file to read it in pieces; its footer may have been read already."""
    is_local = isinstance(system, pafs.LocalFileSystem)
    return pq.ParquetFile(
        path,
        metadata=footer,
        filesystem=system,
        pre_buffer=not is_local,  # fewer and larger requests
        buffer_size=READ_NBYTES if is_local else 0,
        # Nanoseconds, Arrow's default, end in 2262.
        coerce_int96_timestamp_unit="us",
    )


def is_unchanged(system: pafs.FileSystem, path: str, nbytes: int, modified_ms: int) -> bool:
    """Return whether a file has this length, and this time of its last change, since 1970.

    In storages other than local ones only whole seconds of the time count: they record no more.
    """
    info = system.get_file_info(path)
    if info.type != pafs.FileType.File or info.size != nbytes or info.mtime_ns is None:
        return False
    unit_ms = 1 if isinstance(system, pafs.LocalFileSystem) else 1000
    return bool(info.mtime_ns // 1_000_000 // unit_ms == modified_ms // unit_ms)


def find_files(system: pafs.FileSystem, path: str) -> Iterator[str]:
    """Yield the files that `path` means, as Spark reads them.

    A folder stands for the files in it and in its `key=value` folders, at any depth; other folders
    in it are left out, as are names that begin with a dot or an underscore. In a pattern, `*`, `?`
    and `[...]` stand for parts of one name.
    """
    try:
        itself = system.get_file_info(path)
        is_there = itself.type in (pafs.FileType.File, pafs.FileType.Directory)
        for info in [itself] if is_there else _matches(system, path):
            if info.type == pafs.FileType.File:
                yield info.path
            else:
                yield from _in_folder(system, info.path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be listed: {error}. Give a path that this user may read"
        ) from error


def _unknown_scheme(scheme: str, path: str) -> ConfigError:
    return ConfigError(
        f"{path}: agents cannot read {scheme}://. They read local paths and "
        f"{', '.join(_SCHEMES)}. Or feed it through Spark: cluster.feed(spark.read.parquet(...))"
    )


def _is_hidden(name: str) -> bool:
    # Spark's rule: `_SUCCESS` is hidden, and a partition column may begin so.
    is_marker = name.startswith("_") and "=" not in name
    return is_marker or name.startswith(".") or name.endswith((".crc", "._COPYING_"))


def _children(system: pafs.FileSystem, folder: str) -> list[pafs.FileInfo]:
    infos = system.get_file_info(pafs.FileSelector(folder or "/"))
    # Sorted, because nodes that list by themselves must number the rows alike.
    return sorted((i for i in infos if not _is_hidden(i.base_name)), key=lambda info: info.path)


def _matches(system: pafs.FileSystem, pattern: str) -> list[pafs.FileInfo]:
    names = pattern.split("/")
    wild = next((i for i, name in enumerate(names) if re.search(r"[*?[]", name)), len(names))
    if wild == len(names):
        return []
    found = [system.get_file_info("/".join(names[:wild]) or "/")]
    for name in names[wild:]:
        found = [
            info
            for parent in found
            if parent.type == pafs.FileType.Directory
            for info in _children(system, parent.path)
            if fnmatchcase(info.base_name, name)
        ]
    return found


def _in_folder(system: pafs.FileSystem, folder: str) -> Iterator[str]:
    infos = system.get_file_info(pafs.FileSelector(folder, recursive=True))  # one call for S3
    for info in sorted(infos, key=lambda info: info.path):
        *folders, name = info.path[len(folder) :].strip("/").split("/")
        is_file = info.type == pafs.FileType.File and not _is_hidden(name)
        if is_file and all("=" in name for name in folders):
            yield info.path
