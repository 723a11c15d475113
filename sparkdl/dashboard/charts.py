"""The charts of a page: one axis of time for all of them, with marks of what happened.

Below them, what pages show besides: boxes of HTML, and their style.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from bokeh.models import (
    Column,
    ColumnDataSource,
    CrosshairTool,
    DataRange1d,
    Div,
    HoverTool,
    NumeralTickFormatter,
    Range1d,
    Span,
    TimedeltaTickFormatter,
)
from bokeh.plotting import figure

from sparkdl.dashboard import sentences
from sparkdl.driver.history import TRAINING, History, Span as NodeSpan

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
_MS = 1000.0
"""In a second; the axis of time is in these."""
_LEFT, _RIGHT = 84, 14
"""Pixels beside each chart: as many beside all of them, so that moments are above each other."""
_COLORS = ("#3b8eea", "#e0823d", "#2fa36b", "#b065d6")
_BAD, _SAVED = "#d9484f", "#74c69d"
PHASES = {  # and their colors
    "starting": "#aeb6c2",
    "gathering": "#8d99ab",
    "preparing": "#6f7f97",
    TRAINING: "#3b8eea",
    "returned": "#2fa36b",
    "failed": _BAD,
    "stopping": "#c9a227",
    "stopped": "#5d6675",
}
_MAX_MARKS = 40
"""Checkpoints: of more, only every second, third and so on is drawn."""
_MANY = 40
"""Nodes; of more, lanes are narrow, have no names, and show what a node does most."""
_MAX_HEIGHT = 480
_PLOT_CSS = "@media (pointer: coarse) { :host { pointer-events: none; } }"
"""A finger on a chart scrolls the page."""


class TimeAxis:
    """The time axis, points and marks that all charts of a page share."""

    def __init__(self) -> None:
        self.points = ColumnDataSource({"time_s": []})
        self.marks = ColumnDataSource({name: [] for name in ("x", "color", "dash", "what")})
        self._range = Range1d(start=0, end=_MS)
        self._clock = TimedeltaTickFormatter()
        self._cross = Span(dimension="height", line_color=SOFT, line_width=1, line_alpha=0.7)
        self._version = -1

    def figure(self, height: int, **options: Any) -> Any:
        plot = figure(
            height=height,
            sizing_mode="stretch_width",
            x_axis_type="timedelta",
            x_range=self._range,
            tools="",
            toolbar_location=None,
            output_backend="canvas",
            window_axis="x",
            min_border_left=_LEFT,
            min_border_right=_RIGHT,
            min_border_top=4,
            background_fill_color=None,
            border_fill_color=None,
            outline_line_color=None,
            stylesheets=[_PLOT_CSS],
            **options,
        )
        plot.add_tools(CrosshairTool(overlay=self._cross, dimensions="height"))
        plot.yaxis.formatter = NumeralTickFormatter(format="0[.][000]a")
        for axis in plot.axis:
            axis.axis_line_color = axis.minor_tick_line_color = None
            axis.major_tick_line_color = axis.major_label_text_color = SOFT
        plot.xaxis.formatter = self._clock
        plot.xgrid.grid_line_color = None
        plot.ygrid.grid_line_color, plot.ygrid.grid_line_alpha = SOFT, 0.22
        marks = plot.vspan(
            "x", source=self.marks, line_color="color", line_dash="dash", line_width=1.5
        )
        marks.level = "overlay"
        plot.add_tools(HoverTool(renderers=[marks], tooltips=[("", "@what")]))
        return plot

    def reset(self) -> None:
        self._version = -1

    def update(self, history: History) -> None:
        self._stream(history)
        show_data(self.marks, _marks(history))
        end_s = max(1.0, history.now_s - history.launched.time_s)
        clock = "%M:%S" if end_s < 3600 else "%H:%M:%S"
        self._clock.update(seconds=clock, minsec=clock, minutes=clock, hourmin=clock)
        if self._range.end != _MS * end_s:
            self._range.end = _MS * end_s

    def _stream(self, history: History) -> None:
        series = history.samples.series
        have = len(self.points.data["time_s"])
        # The series was rewritten, so what the browser has is no beginning of it any more.
        if series.version != self._version or have > len(series.columns["time_s"]):
            self._version, have = series.version, 0
            self.points.data = {name: [] for name in self.points.data}
        for name in series.columns.keys() - self.points.data.keys():
            # A new column has no values for the points before it.
            self.points.data[name] = [math.nan] * have
        new = {name: list(column)[have:] for name, column in series.columns.items()}
        for name in self.points.data.keys() - new.keys():
            # All columns of a source must have one length.
            new[name] = [math.nan] * len(new["time_s"])
        new["time_s"] = [_MS * (time_s - history.launched.time_s) for time_s in new["time_s"]]
        if new["time_s"]:
            self.points.stream(new)


class Chart:
    """Curves over time, below a line with their names and current values.

    Args:
        lines: columns of a history's series, and their labels. Where a line is a mean, the head
            says the lowest and the highest node beside it.
        unit: of the values, behind a space.
        is_from_zero: the axis begins there.
    """

    def __init__(
        self,
        axis: TimeAxis,
        title: str,
        lines: Mapping[str, str],
        unit: str = "",
        is_from_zero: bool = True,
    ) -> None:
        self._title, self.lines, self._unit = title, lines, unit
        self._head = text_box()
        values = DataRange1d(range_padding=0.08, default_span=2)
        if is_from_zero:
            values.start = 0
        if unit == " %":
            values.end = 102
        plot = axis.figure(150, y_range=values)
        for name in lines:
            if name not in axis.points.data:
                axis.points.data[name] = [math.nan] * len(axis.points.data["time_s"])
        curves: list[Any] = [
            plot.line("time_s", name, source=axis.points, color=color, width=2, name=label)
            for color, (name, label) in zip(_COLORS, lines.items(), strict=False)
        ]
        tips = [("", "$name $snap_y{0,0.[0000]}"), (sentences.TIP, "$snap_x{%H:%M:%S}")]
        formatters: Any = {"$snap_x": "datetime"}
        plot.add_tools(
            HoverTool(renderers=curves, mode="vline", tooltips=tips, formatters=formatters)
        )
        self.root = Column(self._head, plot, sizing_mode="stretch_width")

    def update(self, history: History) -> None:
        columns = history.samples.series.columns
        self.root.visible = any(name in columns for name in self.lines)
        parts = []
        for color, (name, label) in zip(_COLORS, self.lines.items(), strict=False):
            now = [_last(columns.get(f"{which}{name}", ())) for which in ("", "least ", "most ")]
            spread = f" <i>({now[1]} to {now[2]})</i>" if now[1] else ""
            chip = f'<span style="color:{color}">&#9632;</span>'
            parts.append(f"{chip} {escape(label)} <b>{now[0]}{self._unit}</b>{spread}")
        show_text(self._head, f"<h2>{escape(self._title)}</h2> {' &ensp; '.join(parts)}")


class Stream:
    def __init__(self, axis: TimeAxis) -> None:
        self._legend = text_box()
        names = ("y", "left", "right", "color", "what", "height")
        self._bars = ColumnDataSource({name: [] for name in names})
        self._range = Range1d(start=0, end=1)
        self._plot = plot = axis.figure(100, y_range=self._range)
        plot.ygrid.grid_line_color = None
        bar: Any = {"fill_color": "color", "line_color": None}
        lanes = plot.hbar("y", "height", "right", "left", source=self._bars, **bar)
        plot.add_tools(HoverTool(renderers=[lanes], tooltips=[("", "@what")]))
        plot.yaxis.ticker = []
        plot.yaxis.major_tick_line_color = None
        self.root = Column(self._legend, plot, sizing_mode="stretch_width")

    def update(self, history: History) -> None:
        names, start_s = history.launched.nodes, history.launched.time_s
        size = max(1, len(names))
        height = min(_MAX_HEIGHT, max(70, 26 * size))
        rows = history.rows()
        ranks = {row.node_id: at for at, row in enumerate(rows)}
        spans = [span for span in history.spans() if span.end_s > span.start_s]
        data = {
            "y": np.array([size - ranks[span.node_id] - 0.5 for span in spans], float),
            "left": np.array([_MS * (span.start_s - start_s) for span in spans], float),
            "right": np.array([_MS * (span.end_s - start_s) for span in spans], float),
            "color": [PHASES.get(span.phase, SOFT) for span in spans],
            "what": [_in_words(span, names[span.node_id], size > _MANY) for span in spans],
            "height": np.full(len(spans), 0.8 if size <= _MANY else 1.5 * size / height),
        }
        show_data(self._bars, data)
        if self._range.end != size:
            self._range.end, self._plot.height = size, height + 30
        named = enumerate(names if size <= _MANY else ())
        lanes = {size - ranks[node_id] - 0.5: name[:12] for node_id, name in named}
        # Only if they differ: each assignment is a message to the browser.
        if self._plot.yaxis.ticker.ticks != list(lanes):
            self._plot.yaxis.ticker = list(lanes)
            self._plot.yaxis.major_label_overrides = lanes
        show_text(self._legend, _legend({span.phase for span in spans}))


def in_short(headline: str) -> str:
    """Return a failure's line without rank, process and host: `worker:1 was killed by SIGKILL`."""
    return re.sub(r" \(rank -?\d+, pid \d+\)( on \S+)?", "", headline).rstrip(". ")


def failures(history: History) -> dict[int, tuple[float, str]]:
    """Return when and why each generation failed, by its number: the cause, in short."""
    causes: dict[int, tuple[float, str]] = {}
    for time_s, generation, problem in history.problems:
        causes.setdefault(generation, (time_s, in_short(problem.headline)))
    return causes


def _marks(history: History) -> dict[str, Any]:
    failed = failures(history)
    marks = [(at, _BAD, "solid", why) for at, why in failed.values()]
    for begun in history.begun:
        if begun.reason and begun.generation - 1 not in failed:
            what = sentences.BEGUN.format(begun.generation + 1, in_short(begun.reason))
            marks.append((begun.time_s, "#c9a227", "solid", what))
    every = max(1, -(-len(history.checkpoints) // _MAX_MARKS))
    marks += [
        (made.time_s, _SAVED, "dashed", sentences.CHECKPOINT.format(made.step))
        for made in list(history.checkpoints)[::every]
    ]
    lines = [(_MS * (at - history.launched.time_s), *rest) for at, *rest in marks]
    names = ("x", "color", "dash", "what")
    return {name: [line[at] for line in lines] for at, name in enumerate(names)}


def _legend(phases: set[str]) -> str:
    shown = {sentences.PHASES.get(p, p): color for p, color in PHASES.items() if p in phases}
    chips = [f'<span style="color:{c}">&#9632;</span> {escape(w)}' for w, c in shown.items()]
    marks = zip(sentences.MARKS, (_BAD, _SAVED), strict=True)
    chips += [f'<span style="color:{color}">&#9474;</span> {w}' for w, color in marks]
    text = "".join(f"<span>{chip}</span>" for chip in chips)
    return f'<h2>{sentences.NODES}</h2> <span class="chips">{text}</span>'


def _in_words(span: NodeSpan, node: str, is_short: bool) -> str:
    phase, duration_s = sentences.PHASES.get(span.phase, span.phase), span.end_s - span.start_s
    text = sentences.LANE if is_short else sentences.LONG_LANE
    text += "" if is_short or span.last_step < 0 else sentences.STEPS
    return text.format(node, phase, duration(duration_s), span.first_step, span.last_step)


def _last(column: Sequence[float]) -> str:
    """Return the last known value in digits; empty for none."""
    last = next((value for value in reversed(column) if not math.isnan(value)), math.nan)
    return "" if math.isnan(last) else f"{last:,.0f}" if abs(last) >= 1000 else f"{last:.3g}"


def text_box(text: str = "") -> Div:
    return Div(text=text, sizing_mode="stretch_width", stylesheets=[CSS], disable_math=True)


def show_text(div: Div, text: str) -> None:
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


def duration(seconds: float) -> str:
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
