"""Which lines of a child are error output, though all its output goes through one pipe.

Runs in: child, agent

One pipe keeps all lines in their order and loses none when the process dies. Horovod's `stderr=`
needs the error lines alone, so a child can mark the lines that Python writes to `sys.stderr`. Lines
that C code or another process writes to the descriptor have no mark.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

MARK = "\u2063"  # an invisible separator
_STARTS = re.compile(r"(?<=[\r\n])(?=[^\r\n])")


class Marker:
    """Puts a mark before each line, also before one that overwrites another."""

    def __init__(self) -> None:
        self._is_at_start = True

    def __call__(self, text: str) -> str:
        """Return the next part of the output with its marks."""
        if not text:
            return text
        starts = self._is_at_start and text[0] not in "\r\n"
        self._is_at_start = text[-1] in "\r\n"
        return MARK * starts + _STARTS.sub(MARK, text)


def mark_error_lines() -> None:
    """Mark what this process writes to `sys.stderr` from now on, logging handlers' lines too."""
    marker, write = Marker(), sys.stderr.write

    def marked(text: str, /) -> int:
        write(marker(text))
        # The length without marks: callers of `write` compare it with the length of their text.
        return len(text)

    sys.stderr.write = marked  # type: ignore[method-assign]


def marked_in(lines: Sequence[str]) -> tuple[int, ...]:
    return tuple(index for index, line in enumerate(lines) if line.startswith(MARK))


def unmarked(line: str) -> str:
    return line.replace(MARK, "")
