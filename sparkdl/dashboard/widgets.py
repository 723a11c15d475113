"""What the pages are made of: curves over time, tables and texts in HTML, their style.

Runs in: dashboard
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import shorten
from typing import Any

import numpy as np
from bokeh.models import (
    ColumnDataSource,
    Div,
    Legend,
    NumberFormatter,
    NumeralTickFormatter,
    StringFormatter,
    TableColumn,
)
from bokeh.plotting import figure

from sparkdl.driver.history import History

_HEIGHT = 240
MS = 1000.0
"""In a second; axes of time are in these."""
_MAX_LABEL_CHARS = 24
SOFT = "#7d8794"
"""Readable on white and on black."""
_COLORS = ("#3b8eea", "#e0823d", "#2fa36b", "#b065d6", "#d94f6b", "#8a8f3c", "#2fa3a3", "#a07a5a")
CSS = """
:host { color: var(--text); font: inherit; } .bk-clearfix { font: inherit; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; vertical-align: top;
  padding: .25em .9em .25em 0; border-bottom: 1px solid var(--line); } th { color: var(--soft); }
h2 { font-size: 1em; margin: .3em 0; } p { margin: .2em 0; } .soft { color: var(--soft); }
.good { color: var(--good); } .busy { color: var(--busy); } .bad { color: var(--bad); }
.wait { color: var(--wait); } b { font-weight: 650; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.4 ui-monospace, monospace;
  background: var(--card); border: 1px solid var(--line); padding: .6em; margin: .3em 0;
  max-height: 32em; overflow-y: auto; }
.log { display: flex; flex-direction: column-reverse; max-height: 34em; overflow-y: auto; }
.log pre { max-height: none; }
summary { cursor: pointer; }
input, select, button { background: var(--card) !important; color: var(--text) !important; }
"""
TABLE_CSS = """
:host { color: var(--text); } .bk-data-table, .slick-viewport, .slick-pane, .grid-canvas,
.slick-header, .slick-header-column.ui-state-default, .slick-header-columns
{ background: var(--back) !important; color: var(--text) !important; }
.slick-header-column.ui-state-default { color: var(--soft) !important; border-color: var(--line) }
.slick-cell { border-color: var(--line) !important; background: var(--back) !important; }
.slick-row:hover .slick-cell { background: var(--card) !important; }
"""


class Curves:
    """Some columns of a history's series over time.

    Args:
        names: returns which of them, and what they are called; a new one may come at any time.
    """

    def __init__(self, title: str, names: Callable[[Iterable[str]], dict[str, str]]) -> None:
        self._names = names
        self._source = ColumnDataSource({"time_s": []})
        self._drawn: list[str] = []
        self._version = -1
        self.figure = new_figure(title)
        legend = Legend(
            orientation="horizontal",
            location="top_left",
            background_fill_alpha=0,
            border_line_color=None,
            label_text_color=SOFT,
            click_policy="hide",
            padding=0,
            margin=2,
        )
        self.figure.add_layout(legend, "above")  # beside the curves, not on them

    def reset(self) -> None:
        """Forget all points."""
        self._version = -1

    def update(self, history: History) -> None:
        """Draw the points that have come."""
        columns = history.samples.series.columns
        names = self._names(columns)
        for name, label in names.items():
            if name not in self._drawn:
                self._source.data[name] = [math.nan] * len(self._source.data["time_s"])
                color = _COLORS[len(self._drawn) % len(_COLORS)]
                self.figure.line(
                    *("time_s", name),
                    source=self._source,
                    color=color,
                    width=2,
                    legend_label=shorten(label, _MAX_LABEL_CHARS, placeholder="…"),
                )
                self._drawn.append(name)
        start_s = history.launched.time_s
        wanted = ["time_s", *self._drawn]
        have = len(self._source.data["time_s"])
        empty = [math.nan] * len(columns["time_s"])
        if history.samples.series.version != self._version or have > len(columns["time_s"]):
            have = 0
            self._source.data = {name: [] for name in wanted}
            self._version = history.samples.series.version
        new = {name: columns.get(name, empty)[have:] for name in wanted}
        new["time_s"] = [MS * (time_s - start_s) for time_s in new["time_s"]]
        if new["time_s"]:
            self._source.stream(new)


def these(*names: str) -> Callable[[Iterable[str]], dict[str, str]]:
    """Return a choice of columns: those of these that are there, called as they are."""
    return lambda there: {name: name for name in names if name in set(there)}


def text_box(text: str = "") -> Div:
    """Return a box of HTML."""
    return Div(text=text, sizing_mode="stretch_width", stylesheets=[CSS], disable_math=True)


def show_text(div: Div, text: str) -> None:
    """Have a box show other HTML, if it is another."""
    if div.text != text:
        div.text = text


def show_data(source: ColumnDataSource, data: Mapping[str, Any]) -> None:
    """Have a source hold other data; to the reader travel the columns that are others."""
    then = source.data
    changed = {
        name: column
        for name, column in data.items()
        if type(column) is not type(then[name]) or not _is_same(column, then[name])
    }
    if not changed:
        return
    if {len(column) for column in then.values()} == {len(column) for column in data.values()}:
        then.update(changed)
    else:
        source.data = dict(data)


def _is_same(column: Any, other: Any) -> bool:
    if isinstance(column, np.ndarray):
        return np.array_equal(column, other, equal_nan=True)
    return bool(column == other)


@dataclass(frozen=True)
class Column:
    """A column of a table, and what a row has there.

    Attributes:
        value: of a row; NaN where it is not known.
        format: of a number, as Numbro writes it; empty for text.
        color: the column with its color, if it has one.
        is_optional: it is shown once some row has something there.
    """

    name: str
    title: str
    width: int
    value: Callable[[Any], Any]
    format: str = ""
    color: str | None = None
    is_optional: bool = False

    def model(self) -> TableColumn:
        """Return the column as Bokeh has it."""
        color: dict[str, Any] = {"text_color": self.color} if self.color else {}
        formatter = (
            NumberFormatter(format=self.format, nan_format="", **color)
            if self.format
            else StringFormatter(**color)
        )
        return TableColumn(
            field=self.name,
            title=self.title,
            width=self.width,
            formatter=formatter,
            visible=not self.is_optional,
        )

    def values(self, rows: Sequence[Any]) -> Any:
        """Return what the rows have there; numbers as an array, which travels as bytes."""
        values = [self.value(row) for row in rows]
        return np.array(values, float) if self.format else values


def new_figure(title: str, height: int = _HEIGHT) -> Any:
    """Return an empty figure over the time of a run."""
    plot = figure(
        title=title,
        height=height,
        sizing_mode="stretch_width",
        x_axis_type="timedelta",
        tools="xpan,xwheel_zoom,reset",
        toolbar_location="right",
        output_backend="canvas",
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
    )
    plot.toolbar.logo = None
    plot.yaxis.formatter = NumeralTickFormatter(format="0[.][00]a")
    plot.title.text_color = SOFT
    for axis in plot.axis:
        axis.axis_line_color = axis.major_tick_line_color = axis.minor_tick_line_color = SOFT
        axis.major_label_text_color = SOFT
    plot.xaxis.formatter.context = None
    plot.grid.grid_line_color, plot.grid.grid_line_alpha = SOFT, 0.25
    return plot


def html_row(tag: str, cells: Iterable[str]) -> str:
    """Return a row of a table; the cells are texts."""
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def duration(seconds: float) -> str:
    """Return a duration as people say it."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
