"""What a user sees of a running cluster: a table, in notebooks a live one, and bars of progress.

Runs in: driver
"""

from __future__ import annotations

import heapq
import logging
import math
import os
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from html import escape
from typing import Any

import psutil

from sparkdl.control.messages import FeedCount, NodeActive
from sparkdl.core.deadline import Deadline
from sparkdl.core.spec import ClusterSpec, InputMode, Printing
from sparkdl.core.world import Member, World
from sparkdl.driver.controller import Controller, View
from sparkdl.driver.lifecycle.state import (
    Failed,
    Finished,
    Gathering,
    Running,
    Stopped,
    before_stop,
    failure_of,
    status_of,
)
from sparkdl.driver.waits import Shares, in_step

_log = logging.getLogger(__name__)

_TABLE_PERIOD_S = 0.5
_MAX_LINES = 20
"""Of the table: so many nodes are all shown."""
_SOME = 3


_SUBMIT = "org.apache.spark.deploy.SparkSubmit"
_LEFT = ' style="text-align:left"'
PERIOD_S = 0.25
"""The bar is drawn this often; Spark's own stays away for half a second."""


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


def printing(log_to_driver: Any) -> Printing:
    """Return the nodes whose output this program prints, or hands to a function."""
    if log_to_driver is None:
        return "first" if has_audience() else "none"
    return "all" if log_to_driver else "none"


def is_submitted() -> bool:
    """Whether spark-submit runs this program, in client mode.

    The program's parent is then the JVM of spark-submit, which copies both streams of the program
    to its own standard output. The environment does not tell: over Spark Connect it names no
    gateway, and in YARN's cluster mode it names one.
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


class LiveTable:
    """Shows what `render` returns, wherever it is asked to, and keeps it up to date.

    Args:
        render: returns the cluster by MIME type: `text/html`, `text/plain`.
    """

    def __init__(self, controller: Controller, render: Callable[[], dict[str, str]]) -> None:
        self._controller = controller
        self._render = render
        self._display_id = f"sparkdl-{controller.spec.cluster_id}"
        self._thread: threading.Thread | None = None

    def show(self) -> None:
        """Show it in the cell that runs.

        Raises:
            NotImplementedError: outside of a notebook; IPython prints the repr then.
        """
        if not in_notebook():
            raise NotImplementedError
        from IPython.display import display

        display(self._render(), raw=True, display_id=self._display_id)
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name=self._display_id, daemon=True)
            self._thread.start()

    def _follow(self) -> None:
        """Update all that is shown, twice a second at most, until the cluster has ended."""
        from IPython.display import update_display

        shown, has_ended = None, False
        while not has_ended:
            has_ended = self._controller.wait_for(
                lambda view: isinstance(view.state, Stopped), Deadline.after(_TABLE_PERIOD_S)
            )
            try:
                now = self._render()
                if now != shown:
                    update_display(now, raw=True, display_id=self._display_id)
                shown = now
            except Exception:  # noqa: BLE001 (the front end's; the training does not need it)
                _log.debug("The table of the cluster is not updated any more", exc_info=True)
                return


def as_html(spec: ClusterSpec, world: World, view: View, tensorboard_url: str | None = None) -> str:
    """Return the table: of each node its place, its process, what it does, the rows it has read.

    Args:
        view: while it is held.
        tensorboard_url: where TensorBoard answers.
    """
    feeds = sorted({feed for _, feed in view.feeds})
    active = {node_id: each for node_id, each in view.activity.items() if each.step >= 0}
    head = ["node", "rank", "host", "pid", "state", *(f"feed {feed!r}" for feed in feeds)]
    if active:
        head.append("step")
    waits = view.waits.shares(in_step(view.state))
    if waits:
        head.append("waits for")
    lines = [
        _line(head, "th"),
        *(_line(_cells(m, view, feeds, active, waits), "td") for m in _shown(world, view)),
    ]
    return "".join(
        [
            f"<b>Cluster {escape(spec.cluster_id)}: {escape(status_of(view.state))}</b>",
            f" ({escape(_what(spec))}{escape(_counts(world, view))})",
            f' <a href="{escape(tensorboard_url)}">TensorBoard</a>' if tensorboard_url else "",
            f"<table>{''.join(lines)}</table>",
            _problem(view),
        ]
    )


def _shown(world: World, view: View) -> list[Member]:
    """Return the members to show: of many the first, the last, the odd and the slowest."""
    members = world.members
    if len(members) <= _MAX_LINES:
        return list(members)
    shown = {*members[:_SOME], *members[-_SOME:]}
    by_state: dict[str, list[Member]] = {}
    for member in members:
        by_state.setdefault(node_state(view, member.node.node_id), []).append(member)
    for same in sorted(by_state.values(), key=len)[:-1]:
        shown |= {*same[:_SOME]}
    steps = Counter({node_id: active.step for node_id, active in view.activity.items()})
    for (node_id, _), count in view.feeds.items():
        steps[node_id] += count.steps
    most = [m for same in sorted(by_state.values(), key=len)[-1:] for m in same]
    if len({steps[m.node.node_id] for m in most}) > 1:
        shown |= {*heapq.nsmallest(_SOME, most, key=lambda m: steps[m.node.node_id])}
    return sorted(shown, key=lambda member: member.rank)


def _counts(world: World, view: View) -> str:
    """Return how many nodes do what, if not all are shown."""
    if world.size <= _MAX_LINES:
        return ""
    states = Counter(node_state(view, member.node.node_id) for member in world.members)
    return "; " + ", ".join(f"{n:,} {what}" for what, n in states.most_common())


def node_state(view: View, node_id: int) -> str:
    """Return what a node does, in a word or two.

    It is `starting` while it has no agent, `gathering` until all nodes have one, and `preparing`
    while its child imports and connects to the others.
    """
    state = before_stop(view.state)
    if any(failure.node_id == node_id for failure in getattr(state, "failures", ())):
        return "failed"
    if node_id in getattr(state, "left", ()):
        return "failed"
    if node_id in getattr(state, "returned", {}):
        return "returned"
    if isinstance(state, Running) and state is view.state:
        return "in map_fun" if node_id in state.in_map_fun else "preparing"
    if isinstance(view.state, Gathering):
        return "gathering" if node_id in view.state.roster.agents else "starting"
    return "stopped" if isinstance(view.state, (Finished, Failed, Stopped)) else "stopping"


def _what(spec: ClusterSpec) -> str:
    fed = "fed by this driver" if spec.input_mode is InputMode.SPARK else "reads its own data"
    return f"{len(spec.nodes)} nodes, {spec.framework}, {fed}"


def _cells(
    member: Member,
    view: View,
    feeds: Iterable[str],
    active: Mapping[int, NodeActive],
    waits: Mapping[int, Shares],
) -> Iterable[str]:
    node_id = member.node.node_id
    pid = view.pids.get(node_id)
    yield from (member.node.name, str(member.rank), member.host, str(pid or ""))
    yield node_state(view, node_id)
    for feed in feeds:
        yield _progress(view.feeds.get((node_id, feed)))
    if active:
        yield _reported(active.get(node_id))
    if waits:
        yield str(waits.get(node_id, ""))


def _reported(active: NodeActive | None) -> str:
    if active is None:
        return ""
    metrics = (f"{name} {value:.4g}" for name, value in active.numbers.items())
    return ", ".join([f"{active.step:,}", *metrics])


def _progress(count: FeedCount | None) -> str:
    if count is None:
        return ""
    done = {"row": count.rows_consumed, "step": count.steps, "epoch": count.epochs_done}
    return ", ".join(f"{n:,} {what}{'s' * (n != 1)}" for what, n in done.items() if n)


def _line(cells: Iterable[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}{_LEFT}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _problem(view: View) -> str:
    problem = failure_of(view.state)
    if problem is None:
        return ""
    first, *_ = str(problem).splitlines() or [""]
    return f"<pre>{escape(f'{type(problem).__name__}: {first}')}</pre>"


class FeedBar:
    """A bar of rows read by the nodes; shown only where there is a terminal or a notebook.

    In a notebook it is a widget where ipywidgets is installed, and a line of text otherwise.

    Args:
        is_shown: `None` shows it on a terminal and in a notebook.
        total: returns how many rows there are to read, 0 while that is unknown.
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
        if not in_notebook():
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
            rows_read: those that a checkpoint covers count; fewer after a restart.
        """
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
    """Keep log lines that go to the terminal from running into the bar."""
    streams = (sys.stdout, sys.stderr)
    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream in streams
    ]
    old = [(handler, handler.setStream(_Beside(handler.stream))) for handler in handlers]
    # Where logging is not set up, Python writes warnings by a handler of its own.
    last, logging.lastResort = logging.lastResort, logging.StreamHandler(_Beside(sys.stderr))
    logging.lastResort.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logging.lastResort = last
        for handler, stream in old:
            if isinstance(handler.stream, _Beside):
                handler.setStream(stream)


def _submitted_width() -> int | None:
    """Return the width of the terminal to which spark-submit brings this program's output.

    The program itself writes into a pipe there, its errors too, and spark-submit copies that to its
    standard output. `None` where there is none.
    """
    if not is_submitted():
        return None
    with suppress(OSError):
        fd = os.open(f"/proc/{os.getppid()}/fd/1", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            return os.get_terminal_size(fd).columns - 1
        finally:
            os.close(fd)
    return None
