"""Writing files so that all of them appear, or none.

Runs in: driver, feeder

1. The driver makes a hidden folder `_staging-…` within the folder that is written to.
2. Each task writes a file of its own there. What a failed or repeated task left is never named.
3. The driver renames the files that succeeded into the folder; if one cannot be, it takes them all
   back. Only then, to overwrite, it removes what was there before; `_SUCCESS` comes last.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from sparkdl.control.rows import Storage
from sparkdl.core.errors import ConfigError, WriteError
from sparkdl.data.compression import SUFFIXES, Deflater
from sparkdl.storage import locate, open_storage

_SUCCESS = "_SUCCESS"
_FAILURES = (OSError, pa.ArrowException)


@dataclass(frozen=True)
class Destination:
    """A folder, and the hidden one in it that files are first written to.

    Attributes:
        folder: within the storage, as is `staging`.
    """

    storage: Storage
    folder: str
    staging: str

    @classmethod
    def at(cls, path: str, options: dict[str, Any]) -> Destination:
        """Return the destination `path`; nothing is made yet.

        Raises:
            ConfigError: for a storage that there is not, or a pattern.
        """
        storage, folder = locate(path, options)
        return cls(storage, folder, f"{folder}/_staging-{uuid.uuid4().hex}")

    def begin(self) -> None:
        """Make the folders. Runs in the driver, first.

        Raises:
            ConfigError: if there is a file of that name, or folders cannot be made.
        """
        system = open_storage(self.storage)
        try:
            if system.get_file_info(self.folder).type == pafs.FileType.File:
                raise ConfigError(f"{self.folder} is a file; a folder is written to")
            system.create_dir(self.staging, recursive=True)
        except _FAILURES as error:
            raise ConfigError(f"{self.folder} cannot be written to: {error}") from error

    @contextmanager
    def part(self, number: int, compression: str) -> Iterator[tuple[str, Deflater]]:
        """Open a new file of a task; it is removed again if the block fails. Runs in tasks.

        Args:
            number: of the partition, for the file's name.

        Raises:
            WriteError: if it cannot be written.
        """
        name = f"part-{number:05}-{uuid.uuid4().hex}.tfrecord{SUFFIXES[compression]}"
        system, path = open_storage(self.storage), f"{self.staging}/{name}"
        try:
            with system.open_output_stream(path, compression=None) as sink:
                deflater = Deflater(sink, compression)
                yield name, deflater
                deflater.finish()
        except BaseException as error:
            with suppress(*_FAILURES):
                system.delete_file(path)
            if isinstance(error, _FAILURES):
                raise WriteError(f"{path} cannot be written: {error}") from error
            raise

    def commit(self, names: Sequence[str], is_overwrite: bool) -> None:
        """Make the files of these names the folder's, or its only ones. Runs in the driver.

        Raises:
            WriteError: if one cannot be moved, and then none is; or if old ones cannot be removed.
        """
        system = open_storage(self.storage)
        old = self._present(system) if is_overwrite else []
        self._move(system, names)
        try:
            _delete(system, old)
            system.delete_dir(self.staging)
            with system.open_output_stream(f"{self.folder}/{_SUCCESS}", compression=None):
                pass
        except _FAILURES as error:
            raise WriteError(
                f"{self.folder}: the new files are there, whole, but what was there before could "
                f"not all be removed: {error}. Remove it: it has other names"
            ) from error

    def abort(self) -> None:
        """Remove what tasks have written. Runs in the driver.

        Raises:
            WriteError: if that fails; readers pass over what is left.
        """
        try:
            open_storage(self.storage).delete_dir(self.staging)
        except FileNotFoundError:
            return
        except _FAILURES as error:
            raise WriteError(f"{self.staging} could not be removed: {error}") from error

    def _present(self, system: pafs.FileSystem) -> list[pafs.FileInfo]:
        """Return what is in the folder already."""
        infos = system.get_file_info(pafs.FileSelector(self.folder))
        own = self.staging.rpartition("/")[2]
        return [info for info in infos if info.base_name != own]

    def _move(self, system: pafs.FileSystem, names: Iterable[str]) -> None:
        moved: list[str] = []
        try:
            for name in names:
                system.move(f"{self.staging}/{name}", f"{self.folder}/{name}")
                moved.append(name)
        except _FAILURES as error:
            for name in moved:
                with suppress(*_FAILURES):
                    system.delete_file(f"{self.folder}/{name}")
            hint = (
                ". The executors wrote files that the driver does not see: write to a storage "
                "that all share"
                if isinstance(error, FileNotFoundError)
                else ""
            )
            raise WriteError(f"{self.folder}: nothing was written: {error}{hint}") from error


def _delete(system: pafs.FileSystem, infos: Iterable[pafs.FileInfo]) -> None:
    for info in infos:
        if info.type == pafs.FileType.Directory:
            system.delete_dir(info.path)
        else:
            system.delete_file(info.path)
