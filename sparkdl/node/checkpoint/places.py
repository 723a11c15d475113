"""Where checkpoints are: a disk that can rename a folder, or a storage that cannot.

Runs in: driver, child
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import pyarrow.fs as pafs

from sparkdl.node.checkpoint.manifest import MANIFEST, CheckpointName, Manifest
from sparkdl.node.checkpoint.store import MARK, CheckpointStore, plain
from sparkdl.storage import locate, open_storage


def open_store(url: str, scratch: Path | None = None) -> CheckpointStore:
    """Return the checkpoints in the folder at `url`. Creates nothing.

    Args:
        scratch: a local folder of this process; needed to read and write checkpoints elsewhere.

    Raises:
        ConfigError: if the storage cannot be opened.
    """
    storage, path = locate(url)
    system = open_storage(storage)
    kind = LocalStore if isinstance(system, pafs.LocalFileSystem) else CheckpointStore
    return kind(system, path, url, scratch or Path(tempfile.gettempdir()) / "sparkdl")


class LocalStore(CheckpointStore):
    """Checkpoints on a local or mounted disk, where a folder can be synced and renamed."""

    def fetch(self, name: str) -> Path:
        """Return the folder itself."""
        return Path(self._path, name)

    def open(self, name: CheckpointName) -> Path:
        """Return the one folder that all nodes write into."""
        folder = self._unfinished(name)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def finish(self, name: CheckpointName, folder: Path, node: str) -> None:
        """Have the files on the disk, and say so to the first node."""
        _sync_files(folder)
        self._write(str(folder / f"{MARK}{plain(node)}"), b"1")

    def give_up(self, name: CheckpointName, folder: Path | None, for_all: bool) -> None:
        """Delete the folder, if `for_all`: it is that of all nodes."""
        if for_all:
            shutil.rmtree(self._unfinished(name), ignore_errors=True)

    def commit(self, name: CheckpointName, manifest: Manifest) -> str:
        """Put the manifest into the folder, sync it and give it its name; return its URL."""
        folder = self._unfinished(name)
        self.remove_marks(str(folder), manifest.nodes)
        self._write(str(folder / MANIFEST), self.with_files(str(folder), manifest))
        for inner, _, _ in os.walk(folder):
            _sync(Path(inner))
        folder.rename(Path(self._path, str(name)))
        _sync(Path(self._path))
        return f"{self._url}/{name}"

    def _unfinished(self, name: CheckpointName) -> Path:
        return Path(self._path, name.unfinished)

    def _write(self, path: str, data: bytes) -> None:
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def _sync_files(folder: Path) -> None:
    """Have all files in `folder` on the disk, but for what other nodes rename meanwhile."""
    for inner, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                _sync(Path(inner, name))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
