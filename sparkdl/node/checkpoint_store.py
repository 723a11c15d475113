"""The folder of the checkpoints, into which each is written as a whole or not at all.

Runs in: driver, child

On a local or mounted disk all nodes write into one hidden folder, which is synced and renamed. On
HDFS and object stores each node writes into a folder of its own and uploads that; the manifest
comes last. Either way a folder without a manifest that agrees with its files is no checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pyarrow.fs as pafs

from sparkdl.control.rows import FeedCoverage
from sparkdl.core.errors import CheckpointError, ConfigError
from sparkdl.core.world import CheckpointRef
from sparkdl.storage.systems import locate, open_storage

_log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_DIRECTORY = pafs.FileType.Directory
_WAIT = (
    "If a thread or an asynchronous save writes the files, wait for it inside the block: "
    "thread.join(), future.result(), wait_until_finished()"
)
_NAME = re.compile(r"(?P<dot>\.?)step-(?P<step>\d{10,})-(?P<cluster>[A-Za-z0-9_]+)-(?P<round>\d+)")


@dataclass(frozen=True, order=True)
class CheckpointName:
    """The name of a checkpoint's folder, unique among all that write into the same folder."""

    step: int
    cluster_id: str
    generation: int

    def __str__(self) -> str:
        # Padded, so that a listing of the folder is in the order of the steps.
        return f"step-{self.step:010d}-{self.cluster_id}-{self.generation}"

    @property
    def unfinished(self) -> str:
        """The name while it is being written, where folders can be renamed."""
        return f".{self}"

    @classmethod
    def parse(cls, text: str) -> tuple[CheckpointName, bool] | None:
        """Return the name, and whether it is that of an unfinished one; `None` for others."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        name = cls(int(match["step"]), match["cluster"], int(match["round"]))
        return name, bool(match["dot"])


class Manifest(msgspec.Struct, frozen=True):
    """The contents of `manifest.json`, which is written last.

    Args:
        step: the user's count.
        generation: of the world that made it.
        time_s: when it was made, seconds since the epoch.
        nodes: names of the nodes that have written into it.
        feeds: the rows that made its state, by feed.
        files: bytes of each file, by its path in the folder, with slashes.
    """

    step: int
    cluster_id: str
    generation: int
    time_s: float
    nodes: tuple[str, ...]
    feeds: dict[str, FeedCoverage]
    files: dict[str, int] = {}


def decode_manifest(data: bytes) -> Manifest | None:
    try:
        return msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None


@dataclass(frozen=True)
class Entry:
    name: CheckpointName
    path: str
    is_complete: bool


@dataclass(frozen=True)
class Found:
    """A checkpoint of an earlier job; `ref.generation` is -1."""

    ref: CheckpointRef
    manifest: Manifest


class CheckpointStore:
    """Checkpoints in a folder of HDFS or an object store."""

    def __init__(self, system: pafs.FileSystem, path: str, url: str, scratch: Path) -> None:
        self._system = system
        self._path = path
        self._url = url.rstrip("/")
        self._scratch = scratch

    # At launch.

    def check_writable(self) -> bool:
        """Create the folder, and a file in it that is deleted again; return if there was none."""
        probe = f"{self._path}/.probe-{uuid.uuid4().hex}"
        try:
            is_new = self._system.get_file_info(self._path).type == pafs.FileType.NotFound
            self._system.create_dir(self._path, recursive=True)
            # Only a write shows whether writing is allowed: object stores have no permissions.
            with self._system.open_output_stream(probe) as file:
                file.write(b"sparkdl")
            self._system.delete_file(probe)
        except OSError as error:
            raise ConfigError(
                f"checkpoint_dir={self._url} cannot be written: {error}. Choose a folder that all "
                "nodes may write to"
            ) from error
        return bool(is_new)

    def newest(self) -> Found | None:
        """Return the newest checkpoint that is whole; `None` if there is none."""
        try:
            found = []
            for entry in self.entries():
                if not entry.is_complete:
                    continue
                manifest, wrong = self._read(str(entry.name))
                if manifest is None:
                    where = f"{self._url}/{entry.name}"
                    _log.warning(
                        "%s is skipped: %s. An older one is used; delete the folder", where, wrong
                    )
                else:
                    found.append((manifest.step, manifest.time_s, entry, manifest))
        except OSError as error:
            raise CheckpointError(f"checkpoint_dir={self._url} cannot be read: {error}") from error
        if not found:
            return None
        # Jobs may have made checkpoints of the same step in this folder: the later one counts.
        step, _, entry, manifest = max(found, key=lambda each: each[:2])
        return Found(CheckpointRef(self.url_of(entry.name), step, -1), manifest)

    def manifest(self, name: str) -> Manifest:
        """Return the manifest of the checkpoint called `name`, which must be whole."""
        try:
            manifest, wrong = self._read(name)
        except OSError as error:
            raise CheckpointError(f"{self._url}/{name} cannot be read: {error}") from error
        if manifest is None:
            raise CheckpointError(f"{self._url}/{name} is broken: {wrong}")
        return manifest

    def fetch(self, name: str) -> Path:
        """Return a local folder with the checkpoint called `name`, downloaded for this process."""
        folder = self._empty("last-checkpoint")
        pafs.copy_files(f"{self._path}/{name}", str(folder), self._system, pafs.LocalFileSystem())
        return folder

    # At a node.

    def open(self, name: CheckpointName) -> Path:
        """Return a folder for this node to write its files into."""
        return self._empty(f"checkpoint-{name}")

    def finish(self, name: CheckpointName, folder: Path, node: str) -> None:
        """Put what `node` has written where it stays if the machine fails."""
        target = f"{self._path}/{name}"
        self._system.create_dir(target, recursive=True)
        pafs.copy_files(str(folder), target, pafs.LocalFileSystem(), self._system)
        self._write(_mark(target, node), b"1")  # some object stores do not keep empty objects
        shutil.rmtree(folder, ignore_errors=True)

    def give_up(self, name: CheckpointName, folder: Path | None, for_all: bool) -> None:
        """Delete what this node has written, or, `for_all`, what all have."""
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if for_all:
            self._delete(f"{self._path}/{name}")

    def late(self, name: CheckpointName, manifest: Manifest | None = None) -> str:
        """Return a file that was written after its checkpoint was complete; empty if none is seen.

        Args:
            manifest: of the checkpoint, if this node has made it complete: its files are compared.
        """
        if found := self._written_behind(name):
            return found
        if manifest is None:
            return ""
        path = f"{self._path}/{name}"
        extra = self._files(path).keys() - manifest.files.keys() - {MANIFEST}
        return next(iter([*self._wrong(path, manifest), *extra]), "")

    def revoke(self, name: CheckpointName) -> None:
        with contextlib.suppress(FileNotFoundError):  # another node was first
            self._system.delete_file(f"{self._path}/{name}/{MANIFEST}")

    # At the first node.

    def commit(self, name: CheckpointName, manifest: Manifest) -> Manifest:
        """Make the checkpoint complete; return the manifest with its files."""
        return self._seal(f"{self._path}/{name}", manifest)

    def url_of(self, name: CheckpointName) -> str:
        return f"{self._url}/{name}"

    def sweep(self, made: CheckpointName, keep: int, base: str = "") -> None:
        """Delete all but the newest checkpoints, and the remains of unfinished ones.

        Checkpoints of later steps go as well: the training that made them was abandoned.
        Two are always kept, because the driver may not know of the last one yet.

        Args:
            base: name of the one that this world resumes from: nodes may read it at any time.
        """
        kept = []
        for entry in self.entries():
            if entry.name == made or str(entry.name) == base or _is_ahead(entry, made):
                continue
            if entry.is_complete and entry.name.step < made.step:
                kept.append(entry)
            else:
                self._delete(entry.path)
        kept.sort(key=lambda entry: entry.name, reverse=True)
        # One less than `keep`, because `made` itself is not in the list.
        for entry in kept[max(keep - 1, 1) :]:
            self._delete(entry.path)

    def sweep_unfinished(self, now: CheckpointName) -> None:
        for entry in self.entries():
            if not entry.is_complete and not _is_ahead(entry, now) and entry.name != now:
                self._delete(entry.path)

    def _written_behind(self, name: CheckpointName) -> str:
        return _any_file(self._scratch / f"checkpoint-{name}")

    def _empty(self, name: str) -> Path:
        folder = self._scratch / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def entries(self) -> Iterator[Entry]:
        infos = self._system.get_file_info(pafs.FileSelector(self._path, allow_not_found=True))
        folders = {info.base_name: info.path for info in infos if info.type == _DIRECTORY}
        for base, path in folders.items():
            if (parsed := CheckpointName.parse(base)) is None:
                continue
            name, is_unfinished = parsed
            manifest = self._system.get_file_info(f"{path}/{MANIFEST}")
            is_complete = not is_unfinished and manifest.type == pafs.FileType.File
            if is_complete and (file := _any_file(Path(folders.get(name.unfinished, "")))):
                _log.error("%s", late_text(self.url_of(name), file))
                is_complete = False
            yield Entry(name, path, is_complete)

    def _read(self, name: str) -> tuple[Manifest | None, str]:
        """Return the manifest of a checkpoint, or none and what is wrong with the checkpoint."""
        path = f"{self._path}/{name}"
        with self._system.open_input_stream(f"{path}/{MANIFEST}") as file:
            manifest = decode_manifest(file.read())
        if manifest is None:
            return None, "its manifest is no manifest"
        if wrong := self._wrong(path, manifest):
            return None, f"{wrong[0]} is missing or has another size"
        return manifest, ""

    def _wrong(self, folder: str, manifest: Manifest) -> list[str]:
        # By sizes, because checksums would take reading all files.
        there = self._files(folder)
        return [name for name, size in manifest.files.items() if there.get(name) != size]

    def _files(self, folder: str) -> dict[str, int]:
        infos = self._system.get_file_info(pafs.FileSelector(folder, recursive=True))
        return {
            info.path.strip("/")[len(folder.strip("/")) + 1 :]: info.size
            for info in infos
            if info.type == pafs.FileType.File
        }

    def _seal(self, folder: str, manifest: Manifest) -> Manifest:
        for node in manifest.nodes:
            if self._system.get_file_info(_mark(folder, node)).type != pafs.FileType.File:
                raise CheckpointError(
                    f"{node} has written its part of {self._url} elsewhere: it is not in the "
                    "folder that the first node sees. Put checkpoint_dir on storage that all nodes "
                    "share: a mounted file system, HDFS or an object store"
                )
        for node in manifest.nodes:
            # Before the manifest, which lists all files that remain.
            self._system.delete_file(_mark(folder, node))
        complete = msgspec.structs.replace(manifest, files=self._files(folder))
        if not complete.files:
            raise CheckpointError(
                f"there is no checkpoint of step {manifest.step}: no node has written a file into "
                f"it. Write into the folder that `with ctx.checkpoint(…) as folder` gives. {_WAIT}"
            )
        self._write(
            f"{folder}/{MANIFEST}", msgspec.json.format(msgspec.json.encode(complete), indent=1)
        )
        return complete

    def _write(self, path: str, data: bytes) -> None:
        with self._system.open_output_stream(path) as file:
            file.write(data)

    def _delete(self, path: str) -> None:
        """Delete a folder, its manifest first, so that no half of it looks whole."""
        with contextlib.suppress(OSError):
            self._system.delete_file(f"{path}/{MANIFEST}")
        try:
            self._system.delete_dir(path)
        except FileNotFoundError:
            return
        except OSError as error:
            _log.warning("%s could not be deleted: %s. Delete it by hand", path, error)


class LocalStore(CheckpointStore):
    """Checkpoints on a local or mounted disk, where a folder can be synced and renamed."""

    def fetch(self, name: str) -> Path:
        return Path(self._path, name)

    def open(self, name: CheckpointName) -> Path:
        folder = self._unfinished(name)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def finish(self, name: CheckpointName, folder: Path, node: str) -> None:
        """Flush the files to the disk, and leave a mark for the first node."""
        for inner, _, names in os.walk(folder):
            for each in names:
                with contextlib.suppress(FileNotFoundError):  # other nodes rename theirs meanwhile
                    _sync(Path(inner, each))
        self._write(_mark(str(folder), node), b"1")

    def give_up(self, name: CheckpointName, folder: Path | None, for_all: bool) -> None:
        """Delete the folder, if `for_all`: it is that of all nodes."""
        if for_all:
            shutil.rmtree(self._unfinished(name), ignore_errors=True)

    def commit(self, name: CheckpointName, manifest: Manifest) -> Manifest:
        """Put the manifest into the folder, sync it and give it its name; return the manifest."""
        folder = self._unfinished(name)
        complete = self._seal(str(folder), manifest)
        # A rename may reach the disk before the names inside the folder do, so those come first.
        for inner, _, _ in os.walk(folder):
            _sync(Path(inner))
        folder.rename(Path(self._path, str(name)))
        # The new name is an entry of the parent folder, which is synced for itself.
        _sync(Path(self._path))
        return complete

    def _written_behind(self, name: CheckpointName) -> str:
        # In this order: other nodes may not have completed it yet, and write there.
        is_renamed = Path(self._path, str(name)).is_dir()
        return _any_file(self._unfinished(name)) if is_renamed else ""

    def _unfinished(self, name: CheckpointName) -> Path:
        return Path(self._path, name.unfinished)

    def _write(self, path: str, data: bytes) -> None:
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def late_text(url: str, file: str) -> str:
    return (
        f"the checkpoint {url} is broken and does not count: {file} was written after its block "
        f"had ended. {_WAIT}"
    )


def _any_file(folder: Path) -> str:
    if not folder.name:
        return ""
    return next((str(Path(at, names[0])) for at, _, names in os.walk(folder) if names), "")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_store(url: str, scratch: Path | None = None) -> CheckpointStore:
    """Return the checkpoints in the folder at `url`. Creates nothing.

    Args:
        scratch: a local folder of this process; needed to read and write checkpoints elsewhere.
    """
    storage, path = locate(url)
    system = open_storage(storage)
    kind = LocalStore if isinstance(system, pafs.LocalFileSystem) else CheckpointStore
    return kind(system, path, url, scratch or Path(tempfile.gettempdir()) / "sparkdl")


def _is_ahead(entry: Entry, now: CheckpointName) -> bool:
    """Whether `entry` may be being written, or is of a world after that of `now`."""
    name = entry.name
    if name.cluster_id != now.cluster_id or name.generation < now.generation:
        return False
    return name.generation > now.generation or (not entry.is_complete and name.step > now.step)


def _mark(folder: str, node: str) -> str:
    """Return the file that says that `node` has written its part; a name has a colon in it."""
    return f"{folder}/.written-by-{node.replace(':', '-')}"
