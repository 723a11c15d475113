"""Folders for files that are of use for a moment only."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_place: Path | None = None


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a new folder, which is deleted afterwards.

    In a child it lies within the node's own folder, because a child that is killed deletes nothing:
    the next one of the node does, and the agent in the end.
    """
    with tempfile.TemporaryDirectory(prefix="sparkdl-", dir=_place) as folder:
        yield Path(folder)


def make_scratch_in(folder: Path) -> None:
    """Make this process's folders there from now on; delete those of an earlier process."""
    global _place
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(exist_ok=True)  # its orphans may still write there
    _place = folder


def scratch_of_child() -> Path | None:
    """Return the folder in which `scratch_folder` makes its own; `None` outside of a child."""
    return _place
