"""The pages of the dashboard, made of Bokeh's models.

Each page of each reader is a Bokeh document that looks at the histories once a second and sends the
changes. Texts of nodes and programs become text, never HTML: they are escaped here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import numpy as np
from bokeh.core.templates import FILE
from bokeh.document import Document
from bokeh.models import Column as Stacked
from bokeh.models import (
    ColumnDataSource,
    DataTable,
    NumberFormatter,
    Select,
    StringFormatter,
    TableColumn,
    UIElement,
)

from sparkdl.dashboard.charts import (
    CSS,
    PHASES,
    SOFT,
    Chart,
    Stream,
    TimeAxis,
    duration,
    failures,
    show_data,
    show_text,
    text_box,
)
from sparkdl.driver.history import ENDED, Clusters, History, NodeRow

_PERIOD_MS = 1000
_MAX_METRICS = 12
"""Charts of them; a training may report hundreds."""
_TONES = {
    "gathering": "wait",
    "running": "busy",
    "failing": "bad",
    "failed": "bad",
    "finished": "good",
}
TABLE_CSS = """
:host { color: var(--text); --sans: 14px system-ui, sans-serif; font: var(--sans); }
.bk-data-table, .slick-viewport, .slick-pane, .grid-canvas, .slick-header, .slick-header-columns,
.slick-header-column.ui-state-default { background: var(--back) !important; border: none !important;
  color: var(--text) !important; font: var(--sans); }
.slick-header-column.ui-state-default { color: var(--soft) !important; }
.slick-cell { border: none !important; border-bottom: 1px solid var(--line) !important;
  background: var(--back) !important; font: var(--sans); line-height: 26px !important; }
.slick-row:hover .slick-cell { background: var(--card) !important; }
"""
_template = jinja2.Environment(autoescape=True).from_string(
    Path(__file__).with_name("page.html").read_text(encoding="utf-8")
)


@dataclass(frozen=True)
class Column:
    """A column of a table, and what a row has there.

    Attributes:
        value: of a row; NaN where it is not known.
        format: of a number, as Numbro writes it; empty for text.
        color: the column with its color, if it has one.
    """

    name: str
    title: str
    width: int
    value: Callable[[Any], Any]
    format: str = ""
    color: str | None = None

    def model(self) -> TableColumn:
        color: dict[str, Any] = {"text_color": self.color} if self.color else {}
        formatter = (
            NumberFormatter(format=self.format, nan_format="", **color)
            if self.format
            else StringFormatter(**color)
        )
        return TableColumn(field=self.name, title=self.title, width=self.width, formatter=formatter)

    def values(self, rows: Sequence[Any]) -> Any:
        values = [self.value(row) for row in rows]
        return np.array(values, float) if self.format else values  # which travel as bytes


class Page:
    """One page, as one reader has it open. Its models are shown one below the other."""

    path: ClassVar[str]
    title: ClassVar[str]

    def __init__(self, doc: Document, clusters: Clusters) -> None:
        context = doc.session_context
        asked = context.request.arguments.get("cluster", [b""]) if context else [b""]
        self._clusters = clusters
        self._asked = asked[0].decode(errors="replace")
        self._shown: History | None = None
        self._axis = TimeAxis()
        self._charts: list[Chart | Stream] = []
        self._head = text_box()
        self._select = Select(title="Cluster", visible=False, stylesheets=[CSS])
        self._select.on_change("value", self._choose)
        doc.title = f"{self.title} · sparkdl"
        doc.template = _template
        # What a reader's address asks for goes into the page's links, and could be anything.
        query = f"?cluster={self._asked}" if self._asked.isalnum() else ""
        doc.template_variables.update(
            {"base": FILE, "pages": PAGES, "path": self.path, "query": query}
        )
        for model in (self._head, self._select, *self._models()):
            doc.add_root(model)
        doc.add_periodic_callback(self._turn, _PERIOD_MS)
        self._turn()

    @classmethod
    def build(cls, doc: Document, clusters: Clusters) -> None:
        cls(doc, clusters)

    def _models(self) -> Sequence[UIElement]:
        raise NotImplementedError

    def _update(self, history: History) -> None:
        raise NotImplementedError

    def _choose(self, _attr: str, _old: str, new: str) -> None:
        self._asked = new
        self._turn()

    def _turn(self) -> None:
        names = list(self._clusters.histories)
        history = self._clusters.get(self._asked)
        if history is None:
            self._head.text = "<p>No cluster has been launched yet.</p>"
            return
        if self._select.options != names:
            self._select.options = list(names)
        self._select.visible = len(names) > 1
        if self._select.value != history.launched.cluster and history.launched.cluster in names:
            # Not a choice of the reader's, which would begin another turn.
            self._select.remove_on_change("value", self._choose)
            self._select.value = history.launched.cluster
            self._select.on_change("value", self._choose)
        if history is not self._shown:
            self._shown = history
            self._axis.reset()
        show_text(self._head, _headline(history))
        self._axis.update(history)
        self._update(history)
        for chart in self._charts:
            chart.update(history)


class Overview(Page):
    path, title = "overview", "Overview"

    def _models(self) -> Sequence[UIElement]:
        self._tiles, self._past = text_box(), text_box()
        self._stream = Stream(self._axis)
        rows = {"rows used": "used by training", "rows in": "coming to the nodes"}
        share = {"without rows": "of the last minute, mean of the nodes"}
        self._fixed = [
            Chart(self._axis, "Rows per second, all nodes", rows),
            Chart(self._axis, "Waits for rows", share, " %"),
            Chart(self._axis, "Step", {"step": "step"}),
        ]
        self._metrics: dict[str, Chart] = {}
        self._curves = Stacked(sizing_mode="stretch_width")
        return (self._tiles, self._stream.root, self._curves, self._past)

    def _update(self, history: History) -> None:
        for name in _metric_names(history)[:_MAX_METRICS]:
            if name not in self._metrics:
                about = name.removeprefix("metric "), {name: "mean of the nodes"}
                self._metrics[name] = Chart(self._axis, *about, is_from_zero=False)
        curves = [*self._metrics.values(), *self._fixed]
        self._charts = [self._stream, *curves]
        roots = [chart.root for chart in curves]
        # Only if they differ: the browser makes all charts anew.
        if self._curves.children != roots:
            self._curves.children = roots
        show_text(self._tiles, _tiles(history))
        show_text(self._past, _attempts(history) + _problems(history))


class Nodes(Page):
    path, title = "nodes", "Nodes"

    def _models(self) -> Sequence[UIElement]:
        names = ("tone", *(column.name for column in _NODE_COLUMNS))
        self._source = ColumnDataSource({name: [] for name in names})
        self._counts = text_box()
        self._table = DataTable(
            source=self._source,
            columns=[column.model() for column in _NODE_COLUMNS],
            index_position=None,
            height=_table_height(1),
            sizing_mode="stretch_width",
            autosize_mode="none",
            frozen_columns=2,
            row_height=_ROW_HEIGHT,
            stylesheets=[TABLE_CSS],
            reorderable=False,
        )
        self._charts = [
            Chart(self._axis, "Memory of a node", {"memory_nbytes": "mean"}, " GiB"),
            Chart(self._axis, "Cores busy of a node", {"cores": "mean"}),
            Chart(self._axis, "GPU of a node, busy", {"gpu": "mean"}, " %"),
            Chart(self._axis, "GPU memory of a node", {"gpu_nbytes": "mean"}, " GiB"),
        ]
        charts = [chart.root for chart in self._charts]
        return (self._counts, self._table, *charts, text_box(_NOTE))

    def _update(self, history: History) -> None:
        rows = history.rows()
        data = {column.name: column.values(rows) for column in _NODE_COLUMNS}
        data["tone"] = [_tone(row) for row in rows]
        if self._table.height != _table_height(len(rows)):
            self._table.height = _table_height(len(rows))
        show_data(self._source, data)
        self._table.view.tags = [history.now_s]  # Bokeh's table looks again when its view changes
        counts = Counter(_label(row) for row in rows)
        text = ", ".join(f"{count:,} {escape(label)}" for label, count in sorted(counts.items()))
        show_text(self._counts, f"<p>{text}</p>")


PAGES: tuple[type[Page], ...] = (Overview, Nodes)


def _load(name: str, scale: float = 1.0) -> Callable[[NodeRow], float]:
    return lambda row: row.load.get(name, 0.0) * scale if row.load else math.nan


def _waits(name: str) -> Callable[[NodeRow], float]:
    return lambda row: row.waits.get(name, math.nan)


def _fed(value: Callable[[NodeRow], float]) -> Callable[[NodeRow], float]:
    return lambda row: value(row) if row.received or row.epochs else math.nan


def _buffer(row: NodeRow) -> float:
    limit = row.load.get("feed_limit_nbytes", 0)
    return row.load.get("feed_nbytes", 0) / limit if limit else math.nan


def _known(number: int, least: int = 0) -> float:
    return number if number >= least else math.nan


_ROW_HEIGHT = 28
_NODE_COLUMNS = (
    Column("rank", "Rank", 45, lambda row: row.rank if row.rank >= 0 else ""),
    Column("name", "Node", 85, lambda row: row.name),
    Column("state", "State", 90, lambda row: _label(row), color="tone"),
    Column("step", "Step", 60, lambda row: _known(row.step), "0,0"),
    Column("step_ms", "Step, ms", 70, lambda row: 1000 * row.step_s, "0,0.[0]"),
    Column("used", "Rows used", 85, _fed(lambda row: row.used), "0,0"),
    Column("waits_rows", "Waits: rows", 85, _waits("rows"), "0%"),
    Column("waits_others", "Waits: nodes", 95, _waits("others"), "0%"),
    Column("epochs", "Epochs", 60, _fed(lambda row: row.epochs), "0,0"),
    Column("buffer", "Buffer", 60, _buffer, "0%"),
    Column("cores", "Cores", 55, _load("cores"), "0.0"),
    Column("memory", "Memory, GiB", 100, _load("memory_nbytes", 2**-30), "0,0.0"),
    Column("gpu", "GPU", 52, _load("gpu"), "0%"),
    Column("gpu_memory", "GPU, GiB", 70, _load("gpu_nbytes", 2**-30), "0,0.0"),
    Column("host", "Host", 95, lambda row: row.host),
    Column("pid", "Process", 60, lambda row: _known(row.pid, 1), "0"),
    Column("metrics", "Metrics", 420, lambda row: _metrics(row.metrics)),
)
_NOTE = (
    '<p class="soft">The time of a step is a mean of the last minute. Rows used: of all epochs. '
    "Waits: shares of the last minute in which the node waited for rows, and for the other nodes "
    "in collectives, which is not known of nodes with GPUs.</p>"
)


def _metrics(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number:.4g}" for name, number in metrics.items())


def _label(row: NodeRow) -> str:
    return "failed" if row.problem else PHASES.get(row.state, (row.state,))[0]


def _tone(row: NodeRow) -> str:
    return PHASES.get("failed" if row.problem else row.state, ("", SOFT))[1]


def _table_height(rows: int) -> int:
    return 34 + _ROW_HEIGHT * min(20, max(1, rows))


def _headline(history: History) -> str:
    launched, state = history.launched, history.state
    tone = _TONES.get(state, "soft")
    restarts = max(0, len(history.begun) - 1)
    attempt = history.begun[-1].generation + 1 if restarts else 0
    before = failures(history).get(attempt - 2)
    parts = [
        f"cluster {escape(launched.cluster)}",
        f"{len(launched.nodes):,} nodes of {escape(launched.framework)}",
        f"attempt {attempt}{f': {escape(before[1])}' if before else ''}" if restarts else "",
        duration(history.elapsed_s),
    ]
    text = " · ".join(part for part in parts if part)
    label = "stopped early" if state == "stopped" else state
    return f'<p role="status"><b class="{tone}">{escape(label)}</b> · {text}</p>'


def _metric_names(history: History) -> list[str]:
    found = [name for name in history.samples.series.columns if name.startswith("metric ")]
    return sorted(found, key=lambda name: "loss" not in name)


def _tiles(history: History) -> str:
    rows, columns = history.rows(), history.samples.series.columns
    counts = Counter(_label(row) for row in rows)
    word, count = counts.most_common(1)[0] if counts else ("", 0)
    steps = [row for row in rows if row.step >= 0]
    rates = [row.rate for row in rows if row.rate > 0]
    used = [value for value in columns.get("rows used", ()) if not math.isnan(value)]
    is_over = history.state in ENDED
    metric = next(iter(_metric_names(history)), "")
    values = [value for value in columns.get(metric, ()) if not math.isnan(value)]
    tiles = {
        "Nodes": f"{count:,} of {len(rows):,} {word}" if count < len(rows) else f"{count:,} {word}",
        "Attempt": f"{history.begun[-1].generation + 1}" if history.begun else "",
        "Step": f"{max(row.step for row in steps):,}" if steps else "",
        "Steps / s": f"{np.median(rates):.3g}" if rates and not is_over else "",
        "Rows / s": f"{used[-1]:,.0f}" if used and not is_over else "",
        metric.removeprefix("metric "): f"{values[-1]:.4g}" if values else "",
    }
    shown = "".join(
        f"<div><span>{escape(name)}</span><b>{escape(value)}</b></div>"
        for name, value in tiles.items()
        if value
    )
    return f'<div class="tiles">{shown}</div>'


def _attempts(history: History) -> str:
    start_s, lines = history.launched.time_s, []
    failed = failures(history)
    begun_s = [begun.time_s for begun in history.begun]
    for number, begun in enumerate(history.begun, 1):
        next_s = [*begun_s, history.ended_s or history.now_s][number]
        again = f"attempt {begun.generation + 2}" if number < len(begun_s) else history.state
        end_s, why = failed.get(begun.generation, (next_s, again))
        lines.append(
            (
                f"Attempt {begun.generation + 1}",
                duration(begun.time_s - start_s),
                duration(end_s - begun.time_s),
                why,
            )
        )
    head = ("", "Began after", "Lasted", "How it ended")
    rows = "".join(_html_row("td", cells) for cells in lines)
    table = f'<div class="scroll" tabindex="0"><table>{_html_row("th", head)}{rows}</table></div>'
    return f"<p><h2>Attempts</h2></p>{table}" if rows else ""


def _html_row(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _problems(history: History) -> str:
    if not history.problems:
        return ""
    found = "".join(
        f'<details><summary class="bad">{duration(at_s - history.launched.time_s)}, attempt '
        f"{number + 1}: {escape(problem.headline)}</summary>"
        f"<pre>{escape(problem.text)}</pre></details>"
        for at_s, number, problem in history.problems
    )
    return f"<h2>Failures</h2>{found}"
