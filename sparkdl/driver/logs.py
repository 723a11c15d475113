"""What nodes print, as it comes to the driver.

Runs in: driver
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sparkdl.driver.events import Logged

MAX_LINES = 1000
"""Of the children of a node that have ended."""


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

    Of a node no more are kept than of one child, the newest, however many have ended.
    """

    def __init__(self) -> None:
        self._attempts: dict[int, list[Attempt]] = {}

    def keep(self, node_id: int, attempt: Attempt) -> None:
        """Take in what a child has printed last."""
        before = self.before(node_id, attempt.generation)
        self._attempts[node_id] = _newest([*before, attempt], MAX_LINES)

    def before(self, node_id: int, generation: float = math.inf) -> list[Attempt]:
        """Return those of earlier generations, the oldest first."""
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
    """Return the last attempt, and those before it of which any of the last `limit` lines are."""
    found: list[Attempt] = []
    for attempt in reversed(attempts):
        lines = attempt.lines[max(0, len(attempt.lines) - limit) :] if limit > 0 else ()
        limit -= len(lines)
        if lines or not found:
            found.insert(0, Attempt(attempt.generation, lines))
    return found


def hand_on(on_log: Callable[[LogLine], None], event: Logged) -> None:
    """Call `on_log` with each line that a node has printed, but those that are noise."""
    printed = event.printed
    for place, line in enumerate(printed.lines):
        if place not in printed.noise:
            on_log(LogLine(event.node, line, place in printed.errors))
