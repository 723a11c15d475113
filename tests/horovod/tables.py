"""The tables of docs/horovod.md: which of Horovod's names are there.

Runs in: the process of pytest
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "horovod.md"


def _rows() -> Iterator[tuple[str, str, str]]:
    text = PAGE.read_text(encoding="utf-8")
    for section in re.split(r"^###? ", text, flags=re.MULTILINE)[1:]:
        heading = re.match(r"`(sparkdl\.horovod[\w.]*)`", section)
        for names, verdict in re.findall(r"^\| (`[^|]+`) \| (\w+) \|", section, re.MULTILINE):
            assert heading, f"{names}: the heading of its table is no module"
            for name in re.findall(r"`(\w+)`", names):
                yield heading[1], name, verdict


ROWS = list(_rows())
"""Module, name and verdict of each row."""


def framework_of(module: str, name: str) -> str:
    """Return the framework whose class it is, or nothing."""
    if name.startswith("SyncBatchNorm"):
        return "torch"
    return "keras" if name.endswith(("Callback", "Checkpoint")) else ""
