"""Log files of the nodes' output: one for each node, rotated, on the driver's machine.

The driver writes them, not the nodes: an executor's disk goes with its container, and object stores
cannot be appended to. A thread writes, since a disk may be slow or hang.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from urllib.parse import urlsplit

from sparkdl.core.errors import ConfigError
from sparkdl.driver.events import Event, Logged
from sparkdl.driver.stream import Batches

_log = logging.getLogger(__name__)

_PERIOD_S = 0.2
_MAX_WAITING = 1000
"""Messages of at most a megabyte each, usually far less."""


def check_folder(option: str, folder: str | os.PathLike[str]) -> str:
    """Make a folder of this machine if it is not there, and return its absolute path."""
    text = os.fspath(folder) if isinstance(folder, (str, os.PathLike)) else ""
    if not text:
        raise ConfigError(f"{option}={folder!r}: give the path of a folder")
    found = urlsplit(text)
    if found.scheme not in ("", "file") or found.netloc:
        raise ConfigError(
            f"{option}={text!r} is a URL, and lines are appended to files of the driver's machine: "
            "give a path there, perhaps one at which that storage is mounted"
        )
    own = os.path.abspath(os.path.expanduser(found.path if found.scheme else text))
    try:
        os.makedirs(own, exist_ok=True)
        with tempfile.TemporaryFile(dir=own, buffering=0) as probe:
            # A full disk still creates files. Only their first block fails.
            probe.write(bytes(4096))
    except OSError as error:
        raise ConfigError(
            f"{option}={text!r} cannot be written to on the driver's machine: "
            f"{error.strerror}. Choose another folder, or leave {option} out"
        ) from error
    return own


class LogFiles(Batches):
    """The files of one cluster. A thread writes new lines a few times a second.

    Args:
        folder: for `worker-0.log` and so on, and older `worker-0.log.1`; created with the first
            line.
        max_file_nbytes: of each file.
        old_files: how many are kept of a node, besides the one that grows.
    """

    end_s = 10.0

    def __init__(self, folder: str, max_file_nbytes: int = 64 << 20, old_files: int = 9) -> None:
        super().__init__("The writer of the nodes' log files", "sparkdl-logs", _PERIOD_S)
        self.folder = folder
        self._max_file_nbytes, self._old_files = max_file_nbytes, old_files
        self._files: dict[str, _NodeFile] = {}
        self._has_warned = False

    def put(self, event: Event) -> None:
        if isinstance(event, Logged) and len(self._events) >= _MAX_WAITING:
            self._warn("the disk is too slow")
        else:
            super().put(event)

    def close(self) -> None:
        super().close()
        if self.is_alive():
            self._warn("the disk is too slow")

    def _take(self, events: Sequence[Event], is_last: bool) -> None:
        for event in events:
            if isinstance(event, Logged):
                try:
                    self._file_of(event.node).write("\n".join(event.printed.lines))
                except OSError as error:
                    self._warn(error)

    def _finish(self) -> None:
        for file in self._files.values():
            with suppress(OSError):  # it flushes again
                file.close()

    def _warn(self, why: object) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "Lines of the nodes' output are missing in %s: %s. The training is not affected. "
                "Make room there, or give a faster disk",
                *(self.folder, why),
            )

    def _file_of(self, node: str) -> _NodeFile:
        if node not in self._files:
            os.makedirs(self.folder, exist_ok=True)
            self._files[node] = _NodeFile(
                self._path_of(node),
                maxBytes=self._max_file_nbytes,
                backupCount=self._old_files,
                encoding="utf-8",
                errors="replace",
            )
        return self._files[node]

    def _path_of(self, node: str) -> str:
        return os.path.join(self.folder, f"{node.replace(':', '-')}.log")


class _NodeFile(RotatingFileHandler):
    def write(self, text: str) -> None:
        self.emit(logging.makeLogRecord({"msg": text}))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging calls it so)
        # `emit` calls this within its except clause: the bare raise lets its error through.
        raise
