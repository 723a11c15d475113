"""Progress that the user sees while a feed runs.

Runs in: driver
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any

from sparkdl.core.settings import is_submitted
from sparkdl.driver.show.notebook import in_notebook

PERIOD_S = 0.25
"""The bar is drawn this often; Spark's own stays away for half a second."""


class FeedBar:
    """A bar of rows read by the nodes; nothing where nobody looks.

    In a notebook it is a widget where ipywidgets is installed, and a line of text otherwise.

    Args:
        is_shown: `None` shows it on a terminal and in a notebook.
        total: returns how many rows there are to read, 0 as long as nobody knows.
        hide_others: has other bars leave the terminal for half a second.
    """

    def __init__(
        self,
        feed: str,
        epochs: int,
        is_shown: bool | None,
        total: Callable[[], int] = lambda: 0,
        hide_others: Callable[[], None] = lambda: None,
    ) -> None:
        self._what = f"feed {feed!r}" + (f", {epochs} epochs" if epochs > 1 else "")
        self._is_asked = is_shown
        self._total = total
        self._hide_others = hide_others
        self._bar: Any = None
        self._start: int | None = None
        self._drawn_s = 0.0
        self._logging = ExitStack()

    def __enter__(self) -> FeedBar:
        width = None if sys.stderr.isatty() or in_notebook() else _submitted_width()
        is_shown = self._is_asked
        if is_shown is None:
            is_shown = sys.stderr.isatty() or in_notebook() or width is not None
        if not is_shown:
            return self
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are no widgets: the text says as much
            if in_notebook():
                from tqdm.auto import tqdm
            else:  # this very class, so that `print_beside` finds its bars
                from tqdm import tqdm
        self._bar = tqdm(
            desc=self._what,
            unit=" rows",
            total=self._total() or None,
            file=sys.stderr,
            ncols=width,
            dynamic_ncols=width is None,
        )
        if not in_notebook():
            self._logging.enter_context(_logging_beside())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._hide_others()
            self._bar.close()
        self._logging.close()

    @property
    def period_s(self) -> float | None:
        """How often `update` is to be called at least; `None` if nobody looks."""
        return None if self._bar is None else PERIOD_S

    def update(self, rows_read: int, metrics: Mapping[str, float], is_last: bool = False) -> None:
        """Show how many rows all nodes have read, and the numbers of the first one's reports."""
        if self._start is None:
            self._start = rows_read
        self._start = min(self._start, rows_read)  # nodes that begin anew count anew
        bar, now_s = self._bar, time.monotonic()
        if bar is None or (now_s - self._drawn_s < PERIOD_S and not is_last):
            return
        self._drawn_s = now_s
        total = self._total()
        if total and total != bar.total:
            bar.total = total
            if hasattr(bar, "container"):  # a widget, which has a length of its own
                begun_s = bar.start_t
                bar.reset(total)
                bar.start_t = begun_s
        bar.n = rows_read - self._start
        if metrics:
            bar.set_postfix(metrics, refresh=False)
        self._hide_others()
        bar.refresh()


def print_beside(text: str) -> None:
    """Print a line where no bar is."""
    from tqdm import tqdm

    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()


class _Beside:
    """A stream that takes bars away while it is written to."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> None:
        from tqdm import tqdm

        tqdm.write(text, file=self.stream, end="")

    def flush(self) -> None:
        self.stream.flush()


@contextmanager
def _logging_beside() -> Iterator[None]:
    """Have log lines that go to the terminal not run into the bar."""
    streams = (sys.stdout, sys.stderr)
    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream in streams
    ]
    old = [(handler, handler.setStream(_Beside(handler.stream))) for handler in handlers]
    try:
        yield
    finally:
        for handler, stream in old:
            if isinstance(handler.stream, _Beside):
                handler.setStream(stream)


def _submitted_width() -> int | None:
    """Return the width of the terminal to which spark-submit brings this program's output.

    The program itself writes into a pipe there. `None` where there is none.
    """
    if not is_submitted():
        return None
    with suppress(OSError):
        fd = os.open(f"/proc/{os.getppid()}/fd/2", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            return os.get_terminal_size(fd).columns - 1
        finally:
            os.close(fd)
    return None
