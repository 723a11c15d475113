"""The display of a running cluster: a table, live in notebooks, and progress bars.

Runs in: driver
"""

from __future__ import annotations

import heapq
import logging
import math
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from html import escape
from typing import Any

import psutil

from sparkdl.core.spec import Printing
from sparkdl.driver.controller import Controller
from sparkdl.driver.events import Changed, Ended, Event, FeedColumns, Launched, Sampled
from sparkdl.driver.history import History, NodeRow, folded
from sparkdl.driver.options import Observe
from sparkdl.driver.stream import Batches
from sparkdl.driver.waits import in_words

_log = logging.getLogger(__name__)

_TABLE_PERIOD_S = 0.5
_MAX_LINES = 20
"""Lines of the table: up to so many nodes are all shown."""
_SOME = 3
_GIB = 1 << 30
_NARROW, _WITHOUT_RATE = 90, "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
"""In fewer columns a bar has no room for the rate beside the loss."""

_SUBMIT = "org.apache.spark.deploy.SparkSubmit"
_LEFT = ' style="text-align:left"'


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def has_audience() -> bool:
    """Whether a person reads what this program prints.

    True on a terminal, in a notebook, and where spark-submit runs the program in client mode and
    passes its output on.
    """
    return sys.stderr.isatty() or in_notebook() or is_submitted()


def printing(observe: Observe) -> Printing:
    """Return the nodes whose output this program prints, or hands to a function."""
    if observe.on_log is not None or observe.log_to_driver:
        return "all"
    return "first" if observe.log_to_driver is None and has_audience() else "none"


def is_submitted() -> bool:
    """Whether spark-submit runs this program, in client mode.

    The program's parent is then the JVM of spark-submit, which copies both streams of the program
    to its own standard output. The environment is no help: over Spark Connect it names no gateway,
    and in YARN's cluster mode it names one.
    """
    with suppress(psutil.Error):
        parent = psutil.Process().parent()
        return parent is not None and _SUBMIT in parent.cmdline()
    return False


def show_page(url: str, height: int) -> None:
    """Show a page in the cell that runs; outside of a notebook, print where it is."""
    if not in_notebook():
        print_beside(url)
        return
    from IPython.display import IFrame, display

    display(IFrame(url, width="100%", height=height))


class LiveTable(Batches):
    """Shows a cluster as a table, wherever it is asked to, and keeps that up to date.

    Args:
        tensorboard_url: returns where TensorBoard answers.
        text: returns the cluster in a line.
    """

    def __init__(
        self,
        controller: Controller,
        tensorboard_url: Callable[[], str | None],
        text: Callable[[], str],
    ) -> None:
        self._display_id = f"sparkdl-{controller.spec.cluster_id}"
        super().__init__("The table of the cluster", self._display_id, _TABLE_PERIOD_S)
        self._controller = controller
        self._url, self._text = tensorboard_url, text
        self._history = History(controller.spec.cluster_id, controller.events.begun_s)
        self._shown: dict[str, str] = {}

    def render(self, history: History | None = None) -> dict[str, str]:
        """Return the cluster by MIME type: `text/html`, `text/plain`."""
        history = history or folded(self._controller.events.present())
        return {"text/html": as_html(history, self._url()), "text/plain": self._text()}

    def show(self) -> None:
        """Show it in the cell that runs.

        Raises:
            NotImplementedError: outside of a notebook; IPython prints the repr then.
        """
        if not in_notebook():
            raise NotImplementedError
        from IPython.display import display

        display(self.render(), raw=True, display_id=self._display_id)
        if self.ident is None:  # not started yet
            self._controller.events.subscribe(self.put, Launched, Changed, Sampled, Ended)
            self.start()

    def _take(self, events: Sequence[Event], is_last: bool) -> None:
        """Update all that is shown."""
        from IPython.display import update_display

        for event in events:
            self._history.add(event)
        try:
            now = self.render(self._history)
            if now != self._shown:
                update_display(now, raw=True, display_id=self._display_id)
            self._shown = now
        except Exception:  # noqa: BLE001 (the front end's; the training does not need it)
            _log.debug("The table of the cluster was not updated", exc_info=True)


def as_html(history: History, tensorboard_url: str | None = None) -> str:
    """Return a cluster's table, below a line of its state.

    Args:
        tensorboard_url: where TensorBoard answers.
    """
    launched, cause = history.launched, history.cause
    fed = "fed by this driver" if launched.is_fed else "reads its own data"
    what = f"{len(launched.nodes)} nodes, {launched.framework}, {fed}"
    head, *lines = table(history)
    return "".join(
        [
            f"<b>Cluster {escape(history.launched.cluster)}: {escape(history.changed.status)}</b>",
            f" ({escape(what)}{escape(_counts(history.rows()))})",
            f' <a href="{escape(tensorboard_url)}">TensorBoard</a>' if tensorboard_url else "",
            f"<table>{_line(head, 'th')}{''.join(_line(line, 'td') for line in lines)}</table>",
            f"<pre>{escape(cause.headline)}</pre>" if cause else "",
        ]
    )


def table(history: History) -> list[list[str]]:
    """Return a row for each node below headings: its place, process, state and progress.

    Empty columns are left out.
    """
    feeds = history.samples.last.feeds if history.samples.last else {}
    rows = [row for row in history.rows() if row.rank >= 0] or history.rows()
    columns: dict[str, Callable[[NodeRow], str]] = {
        "node": lambda row: row.name,
        "rank": lambda row: str(row.rank) if row.rank >= 0 else "",
        "host": lambda row: row.host,
        "pid": lambda row: str(row.pid or ""),
        "state": lambda row: row.state,
        "step": _reported,
        **{f"feed {name!r}": partial(_progress, feed) for name, feed in feeds.items()},
        "rows/s": lambda row: "" if math.isnan(row.rows_rate) else f"{row.rows_rate:,.0f}",
        "cores": lambda row: f"{row.load['cores']:.1f}" if row.load else "",
        "memory": lambda row: f"{row.load['memory_nbytes'] / _GIB:.1f} GiB" if row.load else "",
        "waits for": lambda row: in_words(row.waits),
    }
    shown = _shown(rows, feeds)
    found = {head: [cell(row) for row in shown] for head, cell in columns.items()}
    kept = {head: cells for head, cells in found.items() if any(cells)}
    return [[*kept], *map(list, zip(*kept.values(), strict=True))]


def _shown(rows: list[NodeRow], feeds: Mapping[str, FeedColumns]) -> list[NodeRow]:
    """Return the nodes to show: of many the first, the last, the odd and the slowest."""
    if len(rows) <= _MAX_LINES:
        return rows
    by_state: dict[str, list[NodeRow]] = {}
    for row in rows:
        by_state.setdefault(row.state, []).append(row)
    *odd, most = sorted(by_state.values(), key=len)
    shown = [*rows[:_SOME], *rows[-_SOME:], *(row for same in odd for row in same[:_SOME])]
    steps = {
        row.node_id: row.step + sum(feed.steps[row.node_id] for feed in feeds.values())
        for row in most
    }
    if len({*steps.values()}) > 1:
        shown += heapq.nsmallest(_SOME, most, key=lambda row: steps[row.node_id])
    found = {row.node_id for row in shown}
    return [row for row in rows if row.node_id in found]


def _counts(rows: list[NodeRow]) -> str:
    """Return the number of nodes in each state, if not all nodes are shown."""
    if len(rows) <= _MAX_LINES:
        return ""
    states = Counter(row.state for row in rows)
    return "; " + ", ".join(f"{n:,} {what}" for what, n in states.most_common())


def _reported(row: NodeRow) -> str:
    metrics = (f"{name} {value:.4g}" for name, value in row.metrics.items())
    return ", ".join([f"{row.step:,}", *metrics]) if row.step >= 0 else ""


def _progress(feed: FeedColumns, row: NodeRow) -> str:
    done = {"row": feed.used, "step": feed.steps, "epoch": feed.epochs}
    counts = {what: column[row.node_id] for what, column in done.items()}
    return ", ".join(f"{n:,} {what}{'s' * (n != 1)}" for what, n in counts.items() if n)


def _line(cells: Iterable[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}{_LEFT}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


class FeedBar:
    """A bar of rows read by the nodes; shown only where there is a terminal or a notebook.

    In a notebook it is a widget where ipywidgets is installed, and a line of text otherwise.

    Args:
        is_shown: `None` shows it on a terminal and in a notebook.
        total: returns how many rows there are to read, 0 while that is unknown.
        hide_others: has other bars leave the terminal for half a second.
        period_s: between two drawings at least; Spark's own bar stays away for half a second.
    """

    def __init__(
        self,
        feed: str,
        epochs: int,
        is_shown: bool | None,
        total: Callable[[], int] = lambda: 0,
        hide_others: Callable[[], None] = lambda: None,
        period_s: float = 0.25,
    ) -> None:
        self._period_s = period_s
        self._what = f"feed {feed!r}" + (f", {epochs} epochs" if epochs > 1 else "")
        self._is_asked = is_shown
        self._total = total
        self._hide_others = hide_others
        self._bar: Any = None
        self._is_begun = False
        self._drawn_s = -math.inf
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
        if not hasattr(self._bar, "container"):  # text, which log lines would run into
            self._logging.enter_context(_logging_beside())
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._hide_others()
            self._bar.close()
        self._logging.close()

    def update(self, rows_read: int, metrics: Mapping[str, float], is_last: bool = False) -> None:
        """Show how many rows of the call have been read, and the first node's reports.

        Args:
            rows_read: including rows covered by a checkpoint; fewer after a restart.
        """
        bar, now_s = self._bar, time.monotonic()
        if bar is None or (now_s - self._drawn_s < self._period_s and not is_last):
            return
        self._drawn_s = now_s
        total = self._total()
        if total and total != bar.total:
            bar.total = total
            if hasattr(bar, "container"):  # a widget, which has a length of its own
                begun_s = bar.start_t
                bar.reset(total)
                bar.start_t = begun_s
        if bar.total and not hasattr(bar, "container"):
            bar.bar_format = _WITHOUT_RATE if bar.ncols and bar.ncols < _NARROW else None
        # The rate is that of the rows since the bar began, without those of an earlier run.
        bar.initial = min(bar.initial, rows_read) if self._is_begun else rows_read
        bar.n, self._is_begun = rows_read, True
        if metrics:
            bar.set_postfix(metrics, refresh=False)
        self._hide_others()
        bar.refresh()


def print_beside(text: str) -> None:
    """Print a line where no bar is."""
    from tqdm import tqdm

    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()


@contextmanager
def _logging_beside() -> Iterator[None]:
    """Keep log lines that go to the terminal from running into the bar."""
    from tqdm.contrib import DummyTqdmFile

    streams = (sys.stdout, sys.stderr)
    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream in streams
    ]
    old = [(handler, handler.setStream(DummyTqdmFile(handler.stream))) for handler in handlers]
    # Where logging is not set up, Python writes warnings by a handler of its own.
    last, logging.lastResort = logging.lastResort, logging.StreamHandler(DummyTqdmFile(sys.stderr))
    logging.lastResort.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logging.lastResort = last
        for handler, stream in old:
            if isinstance(handler.stream, DummyTqdmFile):
                handler.setStream(stream)


def _submitted_width() -> int | None:
    """Return the width of spark-submit's terminal, `None` where there is none."""
    if not is_submitted():
        return None
    # The program itself writes into a pipe, its errors too, and spark-submit copies that to its own
    # standard output.
    with suppress(OSError):
        # Opening it must neither wait nor make it the terminal of this process.
        fd = os.open(f"/proc/{os.getppid()}/fd/1", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            return os.get_terminal_size(fd).columns - 1
        finally:
            os.close(fd)
    return None
