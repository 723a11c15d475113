"""Progress that the user sees while a feed runs.

Runs in: driver
"""

from __future__ import annotations

import sys
import warnings
from types import TracebackType
from typing import Any

from sparkdl.driver.notebook import in_notebook


class FeedBar:
    """A bar of rows read by the nodes; nothing where nobody looks.

    In a notebook it is a widget where ipywidgets is installed, and a line of text otherwise.

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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are no widgets: the text says as much
            from tqdm.auto import tqdm

        is_shown = self._is_shown
        if is_shown is None and in_notebook():
            is_shown = True
        # With None tqdm looks whether the stream is a terminal.
        disable = None if is_shown is None else not is_shown
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
