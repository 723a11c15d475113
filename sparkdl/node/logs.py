"""What a child prints: a file on its executor, read by its end or line by line as it grows.

Runs in: agent
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

_TAIL_NBYTES = 256 * 1024
_MAX_LINE_CHARS = 4000
_MAX_READ_NBYTES = 1024 * 1024
"""Read at once at most, so that what a child prints in a burst still fits into one message."""
_MAX_REST_NBYTES = 64 * 1024


class ChildLog:
    """The file that holds a child's stdout and stderr, in the order they were written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._rest = b""

    def open_for_child(self) -> int:
        """Return a descriptor to append with; the caller closes it."""
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def add(self, text: str) -> None:
        """Append a line of the agent's own."""
        with open(self.open_for_child(), "w", encoding="utf-8") as file:
            file.write(f"sparkdl: {text}\n")

    def nbytes(self) -> int:
        """Return how much has been printed, in bytes."""
        return self.path.stat().st_size if self.path.exists() else 0

    def tail(self, lines: int) -> tuple[str, ...]:
        """Return the last `lines` lines, of the last 256 KiB at most."""
        if lines <= 0 or not self.path.exists():
            return ()
        with self.path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_NBYTES))
            return tuple(deque(_lines(file.read()), maxlen=lines))

    def new_lines(self, is_last: bool = False) -> tuple[str, ...]:
        """Return the whole lines since the last call; with `is_last` an unfinished one as well.

        After a burst it takes several calls to get all: until nothing comes.
        """
        if not self.path.exists():
            return ()
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read(_MAX_READ_NBYTES)
        is_last = is_last and len(data) < _MAX_READ_NBYTES
        self._offset += len(data)
        data = self._rest + data
        cut = data.rfind(b"\n") + 1
        if is_last or len(data) - cut > _MAX_REST_NBYTES:
            cut = len(data)
        self._rest = data[cut:]
        return tuple(_lines(data[:cut]))


def _lines(data: bytes) -> list[str]:
    """Split into lines; of a line that was overwritten by carriage returns, keep the last state."""
    lines = []
    for raw in data.decode(errors="replace").split("\n"):
        states = [part for part in raw.split("\r") if part.strip()]
        if states:
            lines.append(states[-1][:_MAX_LINE_CHARS])
    return lines
