"""Frameworks whose import does not end, and fails.

Runs in: anywhere
"""

from __future__ import annotations

import threading

from sparkdl.frameworks.framework import Framework


class Hanging(Framework):
    """Its import waits for ever."""

    name = "hanging"

    def import_modules(self) -> None:
        """Wait."""
        threading.Event().wait()


class Broken(Framework):
    """Its import fails."""

    name = "broken"

    def import_modules(self) -> None:
        """Fail as a library does that lacks another one."""
        raise OSError("libcublas.so.12: cannot open shared object file")
