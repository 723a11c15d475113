"""The Chromium in which tests, pictures and benchmarks look at the dashboard.

Usage: python -m scripts.chromium, which installs one where that is possible and prints its path;
it prints nothing where there is none: those tests are skipped then.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def find() -> str | None:
    """Return the path of a Chromium, if there is one."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


@contextmanager
def browser() -> Iterator[Browser]:
    """Start it, and end it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=find(), args=list(_FLAGS))
        yield started
        started.close()


def main() -> None:
    """Install one where there is none, as root of a Debian."""
    if find() is None and os.geteuid() == 0 and shutil.which("apt-get") is not None:
        install = ("apt-get", "install", "-y", "-q", "--no-install-recommends", "chromium")
        for command in (("apt-get", "update", "-q"), install):
            subprocess.run(command, capture_output=True, check=False)
    print(find() or "")


if __name__ == "__main__":
    main()
