"""A module for `launch(preload=…)`: leaves the number of each process that imports it in a folder.

Runs in: child

The folder is that of the environment variable `FOLDER`. Where a file `fails` is in it, the import
fails, but not for the first process.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import psutil

from sparkdl.core.deadline import Deadline
from tests.doubles.nodes import SOON_S, processes

NAME = __name__
FOLDER = "SPARKDL_TEST_PRELOADED"
FAILS = "fails"


def importers(folder: Path) -> set[int]:
    """Return the processes that have imported this module."""
    return {int(path.name) for path in folder.iterdir() if path.name.isdigit()}


def imported_spare(node: str, folder: Path) -> psutil.Process:
    """Wait until the spare of `node` has imported this module; return it."""
    deadline, never = Deadline.after(SOON_S), threading.Event()
    while not deadline.has_passed:
        spare = processes()[node].spare if node in processes() else None
        if spare is not None and spare.pid in importers(folder):
            return spare
        never.wait(0.02)
    raise AssertionError(f"{node} has no spare: {processes()}")


def _note() -> None:
    folder = Path(os.environ[FOLDER])
    if (folder / FAILS).exists() and importers(folder):
        raise ValueError("not a second time")
    (folder / str(os.getpid())).touch()


if FOLDER in os.environ and "SPARKDL_NODE" in os.environ:  # in a child
    _note()
