"""What nodes print, as it comes to the driver.

Runs in: driver
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from sparkdl.control.messages import LogLines
from sparkdl.driver.log_files import LogFiles

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LogLine:
    """A line that a child printed."""

    node: str
    text: str


class NodeLogs:
    """Hands on what nodes print.

    Args:
        on_log: called with each line but those that are noise; `None` for nobody.
        files: keep all lines; `None` for none.
    """

    def __init__(
        self, on_log: Callable[[LogLine], None] | None = None, files: LogFiles | None = None
    ) -> None:
        self._on_log = on_log
        self._files = files

    def take(self, node: str, printed: LogLines) -> None:
        """Hand on lines of a node."""
        if self._files is not None:
            self._files.add(node, printed.lines)
        if self._on_log is None:
            return
        try:
            for place, line in enumerate(printed.lines):
                if place not in printed.noise:
                    self._on_log(LogLine(node, line))
        except Exception:  # noqa: BLE001 (user code; it must not end the controller)
            _log.exception("log_to_driver=function failed; the nodes are not harmed")

    def tail(self, node: str, lines: int) -> tuple[str, ...]:
        """Return the last lines of a node that its file has; none without files."""
        return () if self._files is None else self._files.tail(node, lines)

    def close(self) -> None:
        """Finish the files."""
        if self._files is not None:
            self._files.close()
