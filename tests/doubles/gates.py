"""Where a test and a `map_fun` in another process meet: nobody sleeps, nobody polls."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Gate:
    """A named pipe at which this process and one `map_fun` meet."""

    path: Path

    @classmethod
    def at(cls, path: Path) -> Gate:
        os.mkfifo(path)
        return cls(path)

    def wait(self) -> None:
        """In `map_fun`: wait until the gate is opened."""
        self.path.read_bytes()

    def open(self) -> None:
        """Wait until somebody waits at the gate, and let them pass."""
        with self.path.open("wb"):
            pass

    def wait_until_reached(self) -> Opener:
        """Wait until somebody waits at the gate, without letting them pass yet."""
        return Opener(os.open(self.path, os.O_WRONLY))


@dataclass
class Opener:
    """Opens a gate when closed."""

    fd: int

    def __enter__(self) -> Opener:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.fd)
