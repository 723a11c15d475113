"""The parts of pages besides charts: tables and texts in HTML, and their style."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from bokeh.models import (
    ColumnDataSource,
    Div,
    NumberFormatter,
    StringFormatter,
    TableColumn,
)

SOFT = "#7d8794"
"""Readable on white and on black."""
CSS = """
:host { color: var(--text); font: 15px/1.45 system-ui, sans-serif; }
.bk-clearfix { font: inherit; width: 100%; }
h2 { font-size: 1em; display: inline; margin: 0 1em 0 0; }
table { border-collapse: collapse; min-width: min(100%, 40em); }
.scroll { overflow-x: auto; margin-bottom: .6em; }
th, td { text-align: left; vertical-align: top; padding: .3em 1.2em .3em 0;
  border-bottom: 1px solid var(--line); } th { color: var(--soft); font-weight: 500; }
p { margin: .2em 0; } h2, p, .tiles div { overflow-wrap: anywhere; }
.soft, i { color: var(--soft); font-style: normal; }
.good { color: var(--good); } .busy { color: var(--busy); } .bad { color: var(--bad); }
.wait { color: var(--wait); } b { font-weight: 650; font-variant-numeric: tabular-nums; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5em, 1fr)); gap: .6em; }
.tiles div { background: var(--card); border-radius: 8px; padding: .5em .8em; }
.tiles span { color: var(--soft); display: block; font-size: .87em; } .tiles b { font-size: 1.3em; }
.chips { display: inline-flex; flex-wrap: wrap; gap: 0 1em; color: var(--soft); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.4 ui-monospace, monospace;
  background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .6em;
  margin: .3em 0; max-height: 32em; overflow-y: auto; }
summary { cursor: pointer; }
input, select, button, .bk-btn { background: var(--card) !important; color: var(--text) !important;
  border-color: var(--line) !important; } .bk-btn.bk-active { color: var(--busy) !important; }
:focus-visible { outline: 2px solid var(--busy) !important; outline-offset: 1px; }
"""
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


def text_box(text: str = "") -> Div:
    """Return a box of HTML."""
    return Div(text=text, sizing_mode="stretch_width", stylesheets=[CSS], disable_math=True)


def show_text(div: Div, text: str) -> None:
    """Replace a box's HTML, if it has changed."""
    if div.text != text:
        div.text = text


def show_data(source: ColumnDataSource, data: Mapping[str, Any]) -> None:
    """Replace a source's data; only changed columns are sent to the browser."""
    then = source.data
    changed = {
        name: column
        for name, column in data.items()
        if type(column) is not type(then[name]) or not _is_same(column, then[name])
    }
    if not changed:
        return
    # Columns of a source must have one length at any moment, so another length replaces all.
    if {len(column) for column in then.values()} == {len(column) for column in data.values()}:
        then.update(changed)
    else:
        source.data = dict(data)


def _is_same(column: Any, other: Any) -> bool:
    if isinstance(column, np.ndarray):
        # NaN stands for an unknown value, and would differ from itself.
        return np.array_equal(column, other, equal_nan=True)
    return bool(column == other)


@dataclass(frozen=True)
class Column:
    """A column of a table, and what a row has there. One of numbers is hidden while all are 0.

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
            visible=not self.format,
        )

    def values(self, rows: Sequence[Any]) -> Any:
        """Return what the rows have there; numbers as an array, which travels as bytes."""
        values = [self.value(row) for row in rows]
        return np.array(values, float) if self.format else values


def html_row(tag: str, cells: Iterable[str]) -> str:
    """Return a row of a table; the cells are texts."""
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def html_table(title: str, head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table with a title, which scrolls where it is wider than the page; "" if empty."""
    rows = "".join(html_row("td", cells) for cells in lines)
    table = f'<div class="scroll" tabindex="0"><table>{html_row("th", head)}{rows}</table></div>'
    return f"<p><h2>{escape(title)}</h2></p>{table}" if rows else ""


def duration(seconds: float) -> str:
    """Return a duration as people say it."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
