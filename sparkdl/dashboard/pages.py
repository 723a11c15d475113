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
from bokeh.models import (
    Column as Stacked,
    ColumnDataSource,
    DataTable,
    NumberFormatter,
    Select,
    StringFormatter,
    TableColumn,
    UIElement,
)

from sparkdl.core.texts import count
from sparkdl.dashboard import sentences
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
    width: int
    value: Callable[[Any], Any]
    format: str = ""
    color: str | None = None

    def model(self) -> TableColumn:
        color: dict[str, Any] = {"text_color": self.color} if self.color else {}
        number = NumberFormatter(format=self.format, nan_format="", **color)
        formatter = number if self.format else StringFormatter(**color)
        title = sentences.NODE_COLUMNS[self.name]
        return TableColumn(field=self.name, title=title, width=self.width, formatter=formatter)

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
        self._select = Select(title=sentences.CLUSTER, visible=False, stylesheets=[CSS])
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
            self._head.text = f"<p>{sentences.NO_CLUSTER}</p>"
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
    path, title = "overview", sentences.OVERVIEW

    def _models(self) -> Sequence[UIElement]:
        self._tiles, self._past = text_box(), text_box()
        self._stream = Stream(self._axis)
        self._fixed = [Chart(self._axis, *about) for about in sentences.OVERVIEW_CHARTS]
        self._metrics: dict[str, Chart] = {}
        self._curves = Stacked(sizing_mode="stretch_width")
        return (self._tiles, self._stream.root, self._curves, self._past)

    def _update(self, history: History) -> None:
        for name in _metric_names(history)[:_MAX_METRICS]:
            if name not in self._metrics:
                about = name.removeprefix("metric "), {name: sentences.METRIC}
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
    path, title = "nodes", sentences.NODES

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
        self._charts = [Chart(self._axis, *about) for about in sentences.NODE_CHARTS]
        charts = [chart.root for chart in self._charts]
        return self._counts, self._table, *charts, text_box(f'<p class="soft">{sentences.NOTE}</p>')

    def _update(self, history: History) -> None:
        rows = history.rows()
        data = {column.name: column.values(rows) for column in _NODE_COLUMNS}
        data["tone"] = [PHASES.get("failed" if row.problem else row.state, SOFT) for row in rows]
        if self._table.height != _table_height(len(rows)):
            self._table.height = _table_height(len(rows))
        show_data(self._source, data)
        self._table.view.tags = [history.now_s]  # Bokeh's table looks again when its view changes
        counts = Counter(_label(row) for row in rows)
        text = ", ".join(f"{number:,} {escape(label)}" for label, number in sorted(counts.items()))
        show_text(self._counts, f"<p>{text}</p>")


PAGES: tuple[type[Page], ...] = (Overview, Nodes)


def _load(name: str, scale: float = 1.0) -> Callable[[NodeRow], float]:
    return lambda row: row.load.get(name, 0.0) * scale if row.load else math.nan


def _buffer(row: NodeRow) -> float:
    limit = row.load.get("feed_limit_nbytes", 0)
    return row.load.get("feed_nbytes", 0) / limit if limit else math.nan


_ROW_HEIGHT = 28
_NODE_COLUMNS = (
    Column("rank", 45, lambda row: row.rank if row.rank >= 0 else ""),
    Column("name", 85, lambda row: row.name),
    Column("state", 90, lambda row: _label(row), color="tone"),
    Column("step", 60, lambda row: row.step if row.step >= 0 else math.nan, "0,0"),
    Column("step_ms", 70, lambda row: 1000 * row.step_s, "0,0.[0]"),
    Column("used", 85, lambda row: row.used if row.received or row.epochs else math.nan, "0,0"),
    Column("waits_rows", 85, lambda row: row.waits.get("rows", math.nan), "0%"),
    Column("waits_others", 95, lambda row: row.waits.get("others", math.nan), "0%"),
    Column("epochs", 60, lambda row: row.epochs if row.received or row.epochs else math.nan, "0,0"),
    Column("buffer", 60, _buffer, "0%"),
    Column("cores", 55, _load("cores"), "0.0"),
    Column("memory", 100, _load("memory_nbytes", 2**-30), "0,0.0"),
    Column("gpu", 52, _load("gpu"), "0%"),
    Column("gpu_memory", 70, _load("gpu_nbytes", 2**-30), "0,0.0"),
    Column("host", 95, lambda row: row.host),
    Column("pid", 60, lambda row: row.pid or math.nan, "0"),
    Column("metrics", 420, lambda row: _metrics(row.metrics)),
)


def _metrics(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number:.4g}" for name, number in metrics.items())


def _label(row: NodeRow) -> str:
    state = "failed" if row.problem else row.state
    return sentences.PHASES.get(state, state)


def _table_height(rows: int) -> int:
    return 34 + _ROW_HEIGHT * min(20, max(1, rows))


def _headline(history: History) -> str:
    launched, tone = history.launched, _TONES.get(history.state, "soft")
    nodes = count(len(launched.nodes), "node")
    parts = [sentences.HEADLINE.format(launched.cluster, nodes, launched.framework)]
    if len(history.begun) > 1:
        generation = history.begun[-1].generation
        _, why = failures(history).get(generation - 1, (0.0, ""))
        text = sentences.RESTARTED if why else sentences.ATTEMPT
        parts.append(text.format(generation + 1, why))
    text = escape(" · ".join([*parts, duration(history.elapsed_s)]))
    return f'<p role="status"><b class="{tone}">{escape(_state(history))}</b> · {text}</p>'


def _state(history: History) -> str:
    return sentences.STATES.get(history.state, history.state)


def _metric_names(history: History) -> list[str]:
    found = [name for name in history.samples.series.columns if name.startswith("metric ")]
    return sorted(found, key=lambda name: "loss" not in name)


def _tiles(history: History) -> str:
    rows, columns = history.rows(), history.samples.series.columns
    counts = Counter(_label(row) for row in rows)
    word, most = counts.most_common(1)[0] if counts else ("", 0)
    steps = [row for row in rows if row.step >= 0]
    rates = [row.rate for row in rows if row.rate > 0]
    used = [value for value in columns.get("rows used", ()) if not math.isnan(value)]
    is_over = history.state in ENDED
    metric = next(iter(_metric_names(history)), "")
    values = [value for value in columns.get(metric, ()) if not math.isnan(value)]
    tiles = (
        sentences.MOST_NODES.format(most, len(rows), word) if rows else "",
        f"{history.begun[-1].generation + 1}" if history.begun else "",
        f"{max(row.step for row in steps):,}" if steps else "",
        f"{np.median(rates):.3g}" if rates and not is_over else "",
        f"{used[-1]:,.0f}" if used and not is_over else "",
        f"{values[-1]:.4g}" if values else "",
    )
    names = (*sentences.TILES, metric.removeprefix("metric "))
    shown = "".join(
        f"<div><span>{escape(name)}</span><b>{escape(value)}</b></div>"
        for name, value in zip(names, tiles, strict=True)
        if value
    )
    return f'<div class="tiles">{shown}</div>'


def _attempts(history: History) -> str:
    start_s, lines = history.launched.time_s, []
    failed = failures(history)
    begun_s = [begun.time_s for begun in history.begun]
    for number, begun in enumerate(history.begun, 1):
        next_s = [*begun_s, history.ended_s or history.now_s][number]
        again = sentences.CONTINUED.format(begun.generation + 2)
        how = again if number < len(begun_s) else _state(history)
        end_s, why = failed.get(begun.generation, (next_s, how))
        times = duration(begun.time_s - start_s), duration(end_s - begun.time_s)
        name = sentences.ATTEMPT.format(begun.generation + 1).capitalize()
        lines.append((name, *times, why))
    rows = "".join(_html_row("td", cells) for cells in lines)
    head = _html_row("th", sentences.ATTEMPT_COLUMNS)
    table = f'<div class="scroll" tabindex="0"><table>{head}{rows}</table></div>'
    return f"<p><h2>{sentences.ATTEMPTS}</h2></p>{table}" if rows else ""


def _html_row(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _problems(history: History) -> str:
    start_s = history.launched.time_s
    found = "".join(
        f'<details><summary class="bad">{escape(text)}</summary>'
        f"<pre>{escape(problem.text)}</pre></details>"
        for at_s, number, problem in history.problems
        if (text := sentences.FAILED.format(duration(at_s - start_s), number + 1, problem.headline))
    )
    return f"<h2>{sentences.FAILURES}</h2>{found}" if found else ""
