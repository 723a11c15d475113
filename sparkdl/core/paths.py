"""Where a path without a scheme is, as Hadoop's users expect it; and where modules are."""

from __future__ import annotations

import getpass
import os
import sys
from urllib.parse import urlsplit


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
