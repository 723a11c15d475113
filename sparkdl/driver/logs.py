"""The nodes' output, as it reaches the driver.

Runs in: driver
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sparkdl.driver.events import Logged

MAX_LINES = 1000
"""Lines kept of a node's ended children."""


@dataclass(frozen=True)
class LogLine:
    """A line that a child printed.

    Attributes:
        is_error: whether the child marked it as error output, see `node/error_lines.py`.
    """

    node: str
    text: str
    is_error: bool = False


@dataclass(frozen=True)
class Attempt:
    """The last lines of a node's child of one generation."""

    generation: int
    lines: tuple[str, ...]


class LastAttempts:
    """The last lines of children that have ended, by node id.

    For each node only the newest `MAX_LINES` lines of all its ended children are retained.
    """

    def __init__(self) -> None:
        self._attempts: dict[int, list[Attempt]] = {}

    def keep(self, node_id: int, attempt: Attempt) -> None:
        """Store a child's last lines."""
        # Without an attempt of the same generation, whose place this one takes.
        before = self.before(node_id, attempt.generation)
        self._attempts[node_id] = _newest([*before, attempt], MAX_LINES)

    def before(self, node_id: int, generation: float = math.inf) -> list[Attempt]:
        """Return the attempts of earlier generations, the oldest first."""
        kept = self._attempts.get(node_id, [])
        return [attempt for attempt in kept if attempt.generation < generation]


def joined(attempts: Sequence[Attempt], limit: int) -> tuple[str, ...]:
    """Return the last `limit` lines; if they are of several attempts, with a heading for each."""
    found: list[str] = []
    for attempt in _newest(attempts, limit):
        number = attempt.generation
        heading = f"sparkdl: attempt {number + 1} (generation {number})"
        found += [heading, *attempt.lines] if len(attempts) > 1 else attempt.lines
    return tuple(found)


def _newest(attempts: Sequence[Attempt], limit: int) -> list[Attempt]:
    """Return the attempts that hold the last `limit` lines, and the last attempt in any case."""
    found: list[Attempt] = []
    for attempt in reversed(attempts):
        lines = attempt.lines[max(0, len(attempt.lines) - limit) :] if limit > 0 else ()
        limit -= len(lines)
        # The newest attempt is shown even if it has printed nothing: a reader sees that it has
        # begun.
        if lines or not found:
            found.insert(0, Attempt(attempt.generation, lines))
    return found


def hand_on(on_log: Callable[[LogLine], None], event: Logged) -> None:
    """Call `on_log` with each line that a node has printed, if it is to be shown."""
    printed = event.printed
    for place, line in enumerate(printed.lines if printed.is_shown else ()):
        on_log(LogLine(event.node, line, place in printed.errors))
