"""Modules that their first use imports, in the tests of libraries that take seconds to import.

Each worker of pytest-xdist collects all tests, those that others run and the deep ones too.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest


@dataclass(frozen=True)
class Lazy:
    """Has the attributes of the module `path`."""

    path: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what pickle looks for
            raise AttributeError(name)
        return getattr(import_module(self.path), name)


def needs(*names: str) -> pytest.MarkDecorator:
    """Skip the tests of a file where one of these packages is not installed."""
    missing = [name for name in names if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed")
