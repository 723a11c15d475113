"""Folders for a moment, and where a path without a scheme is, as Hadoop's users expect it."""

from __future__ import annotations

import getpass
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

_place: Path | None = None
SCRATCH, LEFT = "scratch", "left"
"""A child's folder in that of its node; and within it, the files that the driver may fetch."""


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


def left_folder() -> Path:
    folder = (_place or Path(tempfile.gettempdir())) / LEFT
    folder.mkdir(exist_ok=True)
    return folder


def absolute_url(path: str, default_fs: str, working_dir: str) -> str:
    """Return `path` as a URL on the default file system, relative to the user's home there.

    A path with a scheme is returned as it is.
    """
    if urlsplit(path).scheme:
        return path
    if path.startswith("/"):
        return default_fs + path
    if default_fs.startswith("file:"):
        return f"{default_fs}{working_dir}/{path}"
    return f"{default_fs}/user/{getpass.getuser()}/{path}"


def python_path() -> str:
    """Return the `PYTHONPATH` with which another process finds the same modules as this one."""
    return os.pathsep.join(filter(None, sys.path))
