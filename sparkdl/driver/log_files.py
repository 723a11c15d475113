"""Log files of the nodes' output: one for each node, rotated, on the driver's machine.

Runs in: driver

The driver writes them, not the nodes: an executor's disk goes with its container, and object stores
cannot be appended to. The output comes over the control connections as for
`Observe(log_to_driver=…)`, at most a megabyte at a time, and less often on larger clusters.

A thread writes, since a disk may be slow or hang. Its queue is bounded. Beyond the bound, and while
the disk is full, lines are only counted, and the file later states how many are missing.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from logging.handlers import RotatingFileHandler
from urllib.parse import urlsplit

from sparkdl.core.errors import ConfigError
from sparkdl.driver.events import Event, Logged
from sparkdl.driver.stream import Batches

_log = logging.getLogger(__name__)

_TAIL_NBYTES = 256 * 1024
_PERIOD_S = 0.2


def check_folder(option: str, folder: str | os.PathLike[str]) -> str:
    """Make a folder of this machine if it is not there, and return its absolute path.

    Args:
        option: of the launch that names it.

    Raises:
        ConfigError: if it is no path of this machine, or cannot be written to.
    """
    with writable(option, folder, "folder") as own:
        os.makedirs(own, exist_ok=True)
        with tempfile.TemporaryFile(dir=own, buffering=0) as probe:
            # A full disk still creates files. Only their first block fails.
            probe.write(bytes(4096))
    return own


@contextmanager
def writable(option: str, path: str | os.PathLike[str], kind: str) -> Iterator[str]:
    """Give the absolute path of a file or folder of this machine to a body that tries to write.

    Args:
        option: of the launch that names it.
        kind: `file` or `folder`.

    Raises:
        ConfigError: if it is no path of this machine, or the body meets an OSError.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
    if not text:
        raise ConfigError(f"{option}={path!r}: give the path of a {kind}")
    found = urlsplit(text)
    if found.scheme not in ("", "file") or found.netloc:
        raise ConfigError(
            f"{option}={text!r} is a URL, and lines are appended to files of the driver's machine: "
            "give a path there, perhaps one at which that storage is mounted"
        )
    try:
        yield os.path.abspath(os.path.expanduser(found.path if found.scheme else text))
    except OSError as error:
        raise ConfigError(
            f"{option}={text!r} cannot be written to on the driver's machine: "
            f"{error.strerror}. Choose another {kind}, or leave {option} out"
        ) from error


class LogFiles(Batches):
    """The files of one cluster. A thread writes new lines a few times a second.

    Args:
        folder: for `worker-0.log` and so on, and older `worker-0.log.1`; created with the first
            line.
        max_file_nbytes: of each file.
        old_files: how many are kept of a node, besides the one that grows.
        max_waiting_chars: of lines that the disk has not taken yet; beyond them lines are lost.
    """

    end_s = 10.0

    def __init__(
        self,
        folder: str,
        max_file_nbytes: int = 64 << 20,
        old_files: int = 9,
        max_waiting_chars: int = 32 << 20,
    ) -> None:
        super().__init__("The writer of the nodes' log files", "sparkdl-logs", _PERIOD_S)
        self.folder = folder
        self._max_file_nbytes, self._old_files = max_file_nbytes, old_files
        self._max_waiting_chars = max_waiting_chars
        self._files: dict[str, _NodeFile] = {}
        self._has_warned = False
        self._lock = threading.Lock()
        self._waiting: dict[str, list[tuple[str | None, int]]] = {}
        """By node, texts and their numbers of lines; `None` for lost lines."""
        self._waiting_chars = 0

    def put(self, event: Event) -> None:
        """Queue lines without blocking; with the last event, write the queue."""
        if isinstance(event, Logged):
            self.add(event.node, event.printed.lines)
        else:
            super().put(event)

    def add(self, node: str, lines: Sequence[str]) -> None:
        """Keep these lines; returns at once."""
        text = "\n".join(lines)
        with self._lock:
            waiting = self._waiting.setdefault(node, [])
            if self._waiting_chars <= self._max_waiting_chars:
                self._waiting_chars += len(text)
                waiting.append((text, len(lines)))
            elif waiting and waiting[-1][0] is None:
                waiting[-1] = None, waiting[-1][1] + len(lines)
            else:
                waiting.append((None, len(lines)))

    def tail(self, node: str, lines: int) -> tuple[str, ...]:
        """Return the last lines of a node's file, of its last 256 KiB at most."""
        try:
            with open(self._path_of(node), "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_NBYTES))
                kept = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ()
        return tuple(kept[max(0, len(kept) - lines) :])

    def close(self) -> None:
        """Write the queue, for ten seconds at most."""
        super().close()
        if self.is_alive():
            _log.warning(
                "The disk of %s is slow: the last lines may be missing. Give a folder on a "
                "faster disk",
                self.folder,
            )

    def _take(self, events: Sequence[Event], is_last: bool) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        # Without the lock: `add`, which runs on the controller's loop, must not wait for the disk.
        for node, texts in waiting.items():
            lost = self._write(node, texts)
            with self._lock:
                self._waiting_chars -= sum(len(text or "") for text, _ in texts)
                if lost:
                    # In front of the lines that have come since, because these are older.
                    self._waiting.setdefault(node, []).insert(0, (None, lost))

    def _write(self, node: str, texts: Sequence[tuple[str | None, int]]) -> int:
        """Append to a node's file; return the number of lost lines not yet mentioned in it."""
        lost = 0
        for text, count in texts:
            missing = lost if text is not None else lost + count
            # The note comes before the first text that can be written again.
            note = [f"\nsparkdl: up to {missing} lines are missing here"] if missing else []
            try:
                self._file_of(node).append("\n".join(note if text is None else [*note, text]))
                lost = 0
            except OSError as error:
                lost += count
                if not self._has_warned:
                    self._has_warned = True
                    _log.warning(
                        "The nodes' output cannot be written to %s: %s. The training is not "
                        "affected. Make room there: writing resumes by itself, and the files state "
                        "how many lines are missing",
                        self.folder,
                        error,
                    )
        return lost

    def _file_of(self, node: str) -> _NodeFile:
        if node not in self._files:
            os.makedirs(self.folder, exist_ok=True)
            self._files[node] = _NodeFile(
                self._path_of(node),
                maxBytes=self._max_file_nbytes,
                backupCount=self._old_files,
                encoding="utf-8",
                errors="replace",
                delay=True,
            )
        return self._files[node]

    def _path_of(self, node: str) -> str:
        return os.path.join(self.folder, f"{node.replace(':', '-')}.log")


class _NodeFile(RotatingFileHandler):
    """A node's log file, open only during a write: there may be more nodes than descriptors."""

    def append(self, text: str) -> None:
        try:
            self.emit(logging.makeLogRecord({"msg": text}))
        except OSError:
            with suppress(OSError):  # it flushes again
                self.close()
            raise
        self.close()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging calls it so)
        # `emit` calls this within its except clause: the bare raise lets its error through.
        raise
