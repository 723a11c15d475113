"""The nodes' output, as it reaches the driver.

Runs in: driver
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sparkdl.driver.events import Logged


@dataclass(frozen=True)
class LogLine:
    """A line that a child printed.

    Attributes:
        is_error: whether the child marked it as error output, see `node/error_lines.py`.
    """

    node: str
    text: str
    is_error: bool = False


def hand_on(on_log: Callable[[LogLine], None], event: Logged) -> None:
    """Call `on_log` with each line that a node has printed, if it is to be shown."""
    printed = event.printed
    for place, line in enumerate(printed.lines if printed.is_shown else ()):
        on_log(LogLine(event.node, line, place in printed.errors))
