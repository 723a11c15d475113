"""Progress that the user sees while a feed runs.

Runs in: driver
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class FeedBar:
    """A bar of rows read by the nodes; nothing where nobody looks.

    Args:
        is_shown: `None` shows it on a terminal and in a notebook.
    """

    def __init__(self, feed: str, epochs: int, is_shown: bool | None) -> None:
        self._feed = feed
        self._epochs = epochs
        self._is_shown = is_shown
        self._bar: Any = None
        self._start: int | None = None

    def __enter__(self) -> FeedBar:
        from tqdm.auto import tqdm

        disable = not self._is_shown if self._is_shown is not None else None
        what = f"feed {self._feed!r}" + (f", {self._epochs} epochs" if self._epochs > 1 else "")
        self._bar = tqdm(
            desc=what, unit=" rows", disable=disable, file=sys.stderr, dynamic_ncols=True
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()

    def update(self, rows_read: int) -> None:
        """Show how many rows all nodes have read."""
        if self._start is None:
            self._start = rows_read
        self._bar.update(rows_read - self._start - self._bar.n)
