"""A module for `Startup(preload=…)`: leaves the number of each process that imports it in a folder.

Runs in: fork server, child

The folder is that of the environment variable `FOLDER`. A file in it says what else an import does:
`starts a thread`, `fails`, or `hangs` in C without letting go of the GIL.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

NAME = __name__
FOLDER = "SPARKDL_TEST_PRELOADED"
STARTS_A_THREAD, FAILS, HANGS = "starts a thread", "fails", "hangs"


def importers(folder: Path) -> set[int]:
    """Return the processes that have imported this module."""
    return {int(path.name) for path in folder.iterdir() if path.name.isdigit()}


def _note() -> None:
    folder = Path(os.environ[FOLDER])
    (folder / str(os.getpid())).touch()
    if (folder / FAILS).exists():
        raise ValueError("as asked")
    if (folder / STARTS_A_THREAD).exists():
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    if (folder / HANGS).exists():
        ctypes.PyDLL(None).pause()


if FOLDER in os.environ:
    _note()
