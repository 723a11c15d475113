"""The pages of the dashboard, made of Bokeh's models.

Runs in: dashboard

Each page of each reader is a Bokeh document that looks at the histories once a second and is sent
what has changed. Texts of nodes and programs become text, never HTML: they are escaped here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import ClassVar

import jinja2
import numpy as np
from bokeh.core.templates import FILE
from bokeh.document import Document
from bokeh.models import (
    Button,
    ColumnDataSource,
    DataTable,
    HoverTool,
    Range1d,
    Select,
    TextInput,
    UIElement,
)

from sparkdl.dashboard.widgets import (
    CSS,
    MS,
    SOFT,
    TABLE_CSS,
    Column,
    Curves,
    duration,
    html_row,
    new_figure,
    show_data,
    show_text,
    text_box,
    these,
)
from sparkdl.driver.events import Ask, AskLog, AskStacks
from sparkdl.driver.history import Clusters, History, NodeRow, Span

_PERIOD_MS = 1000
_LOG_LINES = 1000
_LOOK_S = 2.0
"""A log that is looked at is fetched this often."""
_PHASES = {
    "starting": "#8d99ab",
    "gathering": "#b3a2d6",
    "preparing": "#7d5fc2",
    "in map_fun": "#3b8eea",
    "returned": "#2fa36b",
    "failed": "#d9484f",
    "stopping": "#c9a227",
    "stopped": "#5d6675",
}
_TONES = {
    "gathering": "wait",
    "running": "busy",
    "failing": "bad",
    "failed": "bad",
    "finished": "good",
}
_LOG = '<h2>Last lines</h2><div class="log" tabindex="0"><pre>{}</pre></div>'
_STACK = "<details open><summary>{}</summary><pre>{}</pre></details>"
_template = jinja2.Environment(autoescape=True).from_string(
    Path(__file__).with_name("page.html").read_text(encoding="utf-8")
)


@dataclass(frozen=True)
class Source:
    """What pages show, and how they ask for more; a recorded run cannot be asked."""

    clusters: Clusters
    ask: Callable[[Ask], None] | None


class Page:
    """One page, as one reader has it open. Its models are shown one below the other."""

    path: ClassVar[str]
    title: ClassVar[str]
    _curves: tuple[Curves, ...] = ()

    def __init__(self, doc: Document, source: Source) -> None:
        context = doc.session_context
        asked = context.request.arguments.get("cluster", [b""]) if context else [b""]
        self.source = source
        self._asked = asked[0].decode(errors="replace")
        self._shown: History | None = None
        self._head = text_box()
        self._select = Select(title="Cluster", visible=False, stylesheets=[CSS])
        self._select.on_change("value", self._choose)
        doc.title = f"{self.title} · sparkdl"
        doc.template = _template
        query = f"?cluster={self._asked}" if self._asked.isalnum() else ""
        doc.template_variables.update(
            {"base": FILE, "pages": PAGES, "path": self.path, "query": query}
        )
        for model in (self._head, self._select, *self._models()):
            doc.add_root(model)
        doc.add_periodic_callback(self._turn, _PERIOD_MS)
        self._turn()

    @classmethod
    def build(cls, doc: Document, source: Source) -> None:
        """Fill a reader's document."""
        cls(doc, source)

    def _models(self) -> Sequence[UIElement]:
        """Return what the page consists of, empty."""
        raise NotImplementedError

    def _reset(self, history: History) -> None:
        """Begin to show another cluster."""

    def _update(self, history: History) -> None:
        """Show what is new."""
        raise NotImplementedError

    def _choose(self, _attr: str, _old: str, new: str) -> None:
        self._asked = new
        self._turn()

    def _turn(self) -> None:
        names = list(self.source.clusters.histories)
        history = self.source.clusters.get(self._asked)
        if history is None:
            self._head.text = "<p>No cluster has been launched yet.</p>"
            return
        if self._select.options != names:
            self._select.options = list(names)
        self._select.visible = len(names) > 1
        if self._select.value != history.launched.cluster and history.launched.cluster in names:
            self._select.remove_on_change("value", self._choose)
            self._select.value = history.launched.cluster
            self._select.on_change("value", self._choose)
        if history is not self._shown:
            self._shown = history
            for curve in self._curves:
                curve.reset()
            self._reset(history)
        show_text(self._head, _headline(history))
        for curve in self._curves:
            curve.update(history)
        self._update(history)


class Overview(Page):
    """How it goes: curves, generations, what has failed."""

    path, title = "overview", "Overview"

    def _models(self) -> Sequence[UIElement]:
        self._rows = Curves("Rows per second, all nodes", these("rows in", "rows used"))
        self._steps = Curves("Step", these("step"))
        self._metrics = Curves(
            "Metrics, mean of the nodes",
            lambda names: {n: n.removeprefix("metric ") for n in names if n.startswith("metric ")},
        )
        self._load = Curves("Cores busy, all nodes", these("cores", "gpu"))
        self._curves = (self._rows, self._steps, self._metrics, self._load)
        self._words = text_box()
        self._past = text_box()
        return (self._words, *(curve.figure for curve in self._curves), self._past)

    def _update(self, history: History) -> None:
        self._metrics.figure.visible = any(
            n.startswith("metric ") for n in history.samples.series.columns
        )
        self._load.figure.visible = "cores" in history.samples.series.columns
        self._steps.figure.visible = "step" in history.samples.series.columns
        self._rows.figure.visible = "rows used" in history.samples.series.columns
        show_text(self._words, f"<p>{escape(history.bottleneck())}</p>")
        show_text(self._past, _generations(history) + _problems(history))


class Nodes(Page):
    """A row for each node."""

    path, title = "nodes", "Nodes"

    def _models(self) -> Sequence[UIElement]:
        names = ("tone", "pace", *(column.name for column in _NODE_COLUMNS))
        self._source = ColumnDataSource({name: [] for name in names})
        self._counts = text_box()
        self._columns = [column.model() for column in _NODE_COLUMNS]
        self._table = DataTable(
            source=self._source,
            columns=self._columns,
            index_position=None,
            height=560,
            sizing_mode="stretch_width",
            row_height=26,
            stylesheets=[TABLE_CSS],
            reorderable=False,
        )
        self._failed = text_box()
        return (self._counts, self._table, self._failed, text_box(_NETWORK_NOTE))

    def _reset(self, history: History) -> None:
        for column, model in zip(_NODE_COLUMNS, self._columns, strict=True):
            model.visible = not column.is_optional

    def _update(self, history: History) -> None:
        rows = history.rows()
        data = {column.name: column.values(rows) for column in _NODE_COLUMNS}
        data["tone"] = [_tone(row) for row in rows]
        data["pace"] = [_PHASES["failed"] if row.is_slow else "inherit" for row in rows]
        for column, model in zip(_NODE_COLUMNS, self._columns, strict=True):
            if column.is_optional:  # what is 0 at all nodes is left out of a sample
                model.visible = model.visible or not bool(np.isnan(data[column.name]).all())
                data[column.name] = np.nan_to_num(data[column.name])
        show_data(self._source, data)
        self._table.view.tags = [history.now_s]  # Bokeh's table looks again when its view changes
        counts: dict[str, int] = {}
        for row in rows:
            counts[row.state] = counts.get(row.state, 0) + 1
        said = ", ".join(f"{count:,} {escape(state)}" for state, count in sorted(counts.items()))
        slow = [
            f"{row.name} (the others wait for it)" if row.waits.get("lag") else row.name
            for row in rows
            if row.is_slow
        ]
        if slow:
            said += f'; <b class="wait">slow: {escape(", ".join(slow[:8]))}</b>'
        show_text(self._counts, f"<p>{said}</p>")
        failed = "".join(
            f'<p class="bad"><b>{escape(row.name)} failed</b>: {escape(row.problem)}</p>'
            for row in rows
            if row.problem
        )
        show_text(self._failed, failed)


class Feed(Page):
    """Who waits for whom."""

    path, title = "feed", "Feed"

    def _models(self) -> Sequence[UIElement]:
        self._words = text_box()
        rows = Curves("Rows per second, all nodes", these("rows in", "rows used"))
        waits = Curves("Share of the last minute without rows", these("without rows"))
        waits.figure.y_range = Range1d(start=-0.02, end=1.02)
        self._curves = (rows, waits)
        self._table = text_box()
        return (self._words, rows.figure, waits.figure, self._table)

    def _update(self, history: History) -> None:
        words = history.bottleneck() or "No rows are being fed."
        show_text(self._words, f"<p><b>{escape(words)}</b></p>")
        sample = history.samples.last
        lines = []
        for name, feed in sorted(sample.feeds.items()) if sample else ():
            epochs = f"{min(feed.epochs)}" + (
                f" to {max(feed.epochs)}" if min(feed.epochs) != max(feed.epochs) else ""
            )
            cells = (name, f"{sum(feed.received):,}", f"{sum(feed.used):,}", epochs)
            lines.append(html_row("td", cells))
        head = html_row("th", ("Feed", "Rows received", "Rows used, all epochs", "Epochs done"))
        feeds = f"<table>{head}{''.join(lines)}</table>" if lines else ""
        show_text(self._table, feeds + _epochs(history))


class Timeline(Page):
    """What each node did when."""

    path, title = "timeline", "Timeline"

    def _models(self) -> Sequence[UIElement]:
        self._bars = ColumnDataSource(
            {name: [] for name in ("y", "left", "right", "color", "what")}
        )
        self._marks = ColumnDataSource({name: [] for name in ("x", "what")})
        plot = new_figure("What each node did", height=420)
        plot.y_range = self._range = Range1d(start=0, end=1)
        bars = plot.hbar(
            *("y", 0.8, "right", "left"), source=self._bars, color="color", line_color=None
        )
        marks = plot.ray(
            "x", 0, length=0, angle=math.pi / 2, source=self._marks, color="#2fa36b", width=2
        )
        plot.add_tools(HoverTool(renderers=[bars, marks], tooltips=[("", "@what")]))
        plot.yaxis.ticker = []
        self._plot = plot
        legend = "".join(
            f'<span style="color:{color}">&#9632;</span> {escape(phase)} &nbsp; '
            for phase, color in _PHASES.items()
        )
        self._legend = text_box(f"<p>{legend}| checkpoint</p>")
        self._table = text_box()
        return (self._legend, plot, self._table)

    def _update(self, history: History) -> None:
        names, start_s = history.launched.nodes, history.launched.time_s
        spans = [span for span in history.spans() if span.end_s > span.start_s]
        ranks = {row.node_id: at for at, row in enumerate(history.rows())}
        data = {
            "y": np.array([len(names) - ranks[span.node_id] - 0.5 for span in spans], float),
            "left": np.array([MS * (span.start_s - start_s) for span in spans], float),
            "right": np.array([MS * (span.end_s - start_s) for span in spans], float),
            "color": [_PHASES.get(span.phase, SOFT) for span in spans],
            "what": [f"{names[span.node_id]} {_in_words(span)}" for span in spans],
        }
        show_data(self._bars, data)
        marks = {
            "x": [MS * (mark.time_s - start_s) for mark in history.checkpoints],
            "what": [f"checkpoint of step {mark.step}" for mark in history.checkpoints],
        }
        show_data(self._marks, marks)
        self._range.end = max(1, len(names))
        if len(names) <= 40:
            at = {len(names) - rank - 0.5: names[node_id] for node_id, rank in ranks.items()}
            if self._plot.yaxis.ticker.ticks != list(at):
                self._plot.yaxis.ticker = list(at)
                self._plot.yaxis.major_label_overrides = at
        show_text(self._table, _generations(history))


class Logs(Page):
    """What a node prints, and what its threads do."""

    path, title = "logs", "Logs"

    def _models(self) -> Sequence[UIElement]:
        self._node = Select(title="Node", stylesheets=[CSS])
        self._search = TextInput(title="Lines that contain", stylesheets=[CSS])
        self._button = Button(label="Show stacks of all nodes", stylesheets=[CSS])
        self._button.on_click(self._ask_stacks)
        self._lines, self._stacks = text_box(), text_box()
        self._asked_s = -math.inf
        return (self._node, self._search, self._lines, self._button, self._stacks)

    def _reset(self, history: History) -> None:
        self._node.options = [(str(n), name) for n, name in enumerate(history.launched.nodes)]
        self._node.value = "0" if history.launched.nodes else ""
        self._button.visible = self.source.ask is not None

    def _update(self, history: History) -> None:
        if not self._node.value and history.launched.nodes:
            self._reset(history)
        node_id = int(self._node.value or 0)
        is_due = time.monotonic() - self._asked_s >= _LOOK_S
        if self.source.ask and is_due and history.changed.state != "stopped":
            self._asked_s = time.monotonic()
            self.source.ask(AskLog(history.launched.cluster, node_id, _LOG_LINES))
        printed = history.logs.get(node_id)
        lines = printed.lines if printed else ()
        wanted = self._search.value.lower()
        shown = [line for line in lines if wanted in line.lower()]
        text = escape("\n".join(shown)) or '<span class="soft">Nothing.</span>'
        show_text(self._lines, _LOG.format(text))
        stacks = history.stacks.stacks if history.stacks else {}
        show_text(
            self._stacks,
            "".join(_STACK.format(escape(name), escape(text)) for name, text in stacks.items())
            + _problems(history),
        )

    def _ask_stacks(self) -> None:
        if self.source.ask and self._shown:
            self.source.ask(AskStacks(self._shown.launched.cluster))


PAGES: tuple[type[Page], ...] = (Overview, Nodes, Feed, Timeline, Logs)


def _in_words(span: Span) -> str:
    steps = f", steps {span.first_step:,} to {span.last_step:,}" if span.last_step >= 0 else ""
    return f"{span.phase} for {duration(span.end_s - span.start_s)}{steps}"


def _load(name: str, scale: float = 1.0) -> Callable[[NodeRow], float]:
    return lambda row: row.load[name] * scale if name in row.load else math.nan


def _fed(value: Callable[[NodeRow], float]) -> Callable[[NodeRow], float]:
    return lambda row: value(row) if row.received or row.epochs else math.nan


def _buffer(row: NodeRow) -> float:
    limit = row.load.get("feed_limit_nbytes", 0)
    return row.load.get("feed_nbytes", 0) / limit if limit else math.nan


def _known(number: int, least: int = 0) -> float:
    return number if number >= least else math.nan


_NODE_COLUMNS = (
    Column("rank", "Rank", 45, lambda row: _known(row.rank), "0"),
    Column("name", "Node", 85, lambda row: row.name),
    Column("host", "Host", 95, lambda row: row.host),
    Column("pid", "Process", 60, lambda row: _known(row.pid, 1), "0"),
    Column(
        *("state", "State", 90, lambda row: "failed" if row.problem else row.state),
        color="tone",
    ),
    Column("step", "Step", 60, lambda row: _known(row.step), "0,0", is_optional=True),
    Column(
        *("step_ms", "Step, ms", 70, lambda row: 1000 * row.step_s, "0,0.[0]", "pace"),
        is_optional=True,
    ),
    Column("used", "Rows used", 85, _fed(lambda row: row.used), "0,0", is_optional=True),
    Column(
        *("waits_rows", "Waits: rows", 85, lambda row: row.waits.get("rows", math.nan), "0%"),
        is_optional=True,
    ),
    Column(
        *("waits_others", "Nodes", 60, lambda row: row.waits.get("others", math.nan), "0%"),
        is_optional=True,
    ),
    Column("epochs", "Epochs", 60, _fed(lambda row: row.epochs), "0,0", is_optional=True),
    Column("buffer", "Buffer", 60, _buffer, "0%", is_optional=True),
    Column("cores", "Cores", 55, _load("cores"), "0.0", is_optional=True),
    Column("memory", "Memory, GiB", 100, _load("memory_nbytes", 2**-30), "0,0.0", is_optional=True),
    Column("gpu", "GPU", 45, _load("gpu"), "0%", is_optional=True),
    Column(
        *("gpu_memory", "GPU, GiB", 70, _load("gpu_nbytes", 2**-30), "0,0.0"),
        is_optional=True,
    ),
    Column(
        *("received", "In, MB/s", 75, _load("received_nbytes_s", 1e-6), "0,0.0"),
        is_optional=True,
    ),
    Column(*("sent", "Out, MB/s", 80, _load("sent_nbytes_s", 1e-6), "0,0.0"), is_optional=True),
    Column("metrics", "Metrics", 200, lambda row: _metrics(row.metrics)),
)
_NETWORK_NOTE = (
    '<p class="soft">The time of a step is a mean of the last minute. Rows used: of all epochs. '
    "Waits: shares of the last minute in which the node waited for rows, and for the other nodes "
    "in collectives, which is not known of nodes with GPUs. In and out: what crosses the network "
    "interfaces of the node's host or container, for all processes there, without loopback.</p>"
)


def _metrics(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number:.4g}" for name, number in metrics.items())


def _tone(row: NodeRow) -> str:
    return _PHASES["failed"] if row.problem else _PHASES.get(row.state, SOFT)


def _headline(history: History) -> str:
    launched = history.launched
    tone = _TONES.get(history.state, "soft")
    restarts = max(0, len(history.begun) - 1)
    parts = [
        f"cluster {escape(history.launched.cluster)}",
        f"{len(launched.nodes):,} nodes of {escape(launched.framework)}",
        f"generation {history.changed.generation}" if history.changed.generation >= 0 else "",
        f"{restarts} restart{'s' * (restarts > 1)}" if restarts else "",
        duration(history.elapsed_s),
        "" if math.isnan(left_s := history.left_s()) else f"about {duration(left_s)} left to read",
    ]
    text = " · ".join(part for part in parts if part)
    return f'<p role="status"><b class="{tone}">{escape(history.state)}</b> · {text}</p>'


def _generations(history: History) -> str:
    start_s = history.launched.time_s
    lines = [
        html_row(
            "td", (duration(at.time_s - start_s), str(at.generation), at.reason or "the launch")
        )
        for at in history.begun
    ]
    if not lines:
        return ""
    head = html_row("th", ("After", "Generation", "Begun because of"))
    return f"<h2>Generations</h2><table>{head}{''.join(lines)}</table>"


def _epochs(history: History) -> str:
    """Return a table of how the rows of the last epochs have come, the newest first."""
    lines = []
    for generation, fed in reversed(history.epochs):
        way = "files that nodes read" if fed.way == "files" else "partitions that were fed"
        ways = [(f"{fed.first}", way)]
        if fed.last > fed.first:
            more = f"{fed.first + 1}" + (f" to {fed.last}" if fed.last > fed.first + 1 else "")
            ways.insert(0, (more, "rows that nodes kept"))
        at = duration(fed.time_s - history.launched.time_s)
        of = f" of generation {generation}" if generation else ""
        lines += [
            html_row("td", (fed.feed, epochs + of, way, f"{fed.rows:,}", at))
            for epochs, way in ways
        ]
    head = html_row("th", ("Feed", "Epoch", "Its rows come from", "Rows", "Known after"))
    return f"<table>{head}{''.join(lines)}</table>" if lines else ""


def _problems(history: History) -> str:
    if not history.problems:
        return ""
    found = "".join(
        f'<details><summary class="bad">{duration(at_s - history.launched.time_s)}, generation '
        f"{number}: {escape(problem.headline)}</summary><pre>{escape(problem.text)}</pre></details>"
        for at_s, number, problem in history.problems
    )
    return f"<h2>Failures</h2>{found}"
