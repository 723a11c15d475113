"""The charts of a page: one axis of time for all of them, with marks of what happened."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from bokeh.models import (
    Column,
    ColumnDataSource,
    CrosshairTool,
    DataRange1d,
    HoverTool,
    NumeralTickFormatter,
    RadioButtonGroup,
    Range1d,
    Span,
    TimedeltaTickFormatter,
)
from bokeh.plotting import figure

from sparkdl.dashboard.widgets import CSS, SOFT, duration, show_data, show_text, text_box
from sparkdl.driver.history import TRAINING, History
from sparkdl.driver.history import Span as NodeSpan

_MS = 1000.0
"""In a second; the axis of time is in these."""
_LEFT, _RIGHT = 84, 14
"""Pixels beside each chart: as many beside all of them, so that moments are above each other."""
_COLORS = ("#3b8eea", "#e0823d", "#2fa36b", "#b065d6")
_BAD, _SAVED = "#d9484f", "#74c69d"
PHASES = {  # a phase's label here, and its color
    "starting": ("starting", "#aeb6c2"),
    "gathering": ("gathering", "#8d99ab"),
    "preparing": ("preparing", "#6f7f97"),
    TRAINING: ("working", "#3b8eea"),
    "returned": ("returned", "#2fa36b"),
    "failed": ("failed", _BAD),
    "stopping": ("stopping", "#c9a227"),
    "stopped": ("stopped", "#5d6675"),
}
_WINDOWS_S = {"Whole run": math.inf, "Last 10 min": 600.0, "Last minute": 60.0}
_MAX_MARKS = 40
"""Marks of a kind: of more, only every second, third and so on is drawn."""
_MANY = 40
"""Nodes; of more, lanes are narrow, have no names, and show what a node does most."""
_MAX_HEIGHT = 480
_PLOT_CSS = """
@media (pointer: coarse) { :host { pointer-events: none; } }
"""
"""A finger on a chart scrolls the page."""


class TimeAxis:
    """The time axis, points and marks that all charts of a page share.

    Dragging over a chart shows that time in all charts, until the reader chooses another.
    """

    def __init__(self) -> None:
        self.points = ColumnDataSource({"time_s": []})
        self.marks = ColumnDataSource({name: [] for name in ("x", "color", "dash", "what")})
        self.windows = RadioButtonGroup(labels=list(_WINDOWS_S), active=0, stylesheets=[CSS])
        self.windows.on_change("active", self._choose)
        self._range = Range1d(start=0, end=_MS, bounds=(0, _MS))
        self._shown = (0.0, _MS)
        self._clock = TimedeltaTickFormatter()
        self._cross = Span(dimension="height", line_color=SOFT, line_width=1, line_alpha=0.7)
        self._version = -1

    def figure(self, height: int, **options: Any) -> Any:
        """Return an empty figure over this axis."""
        plot = figure(
            height=height,
            sizing_mode="stretch_width",
            x_axis_type="timedelta",
            x_range=self._range,
            tools="xbox_zoom",
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
        """Forget all points."""
        self._version = -1

    def update(self, history: History) -> None:
        """Show the points and marks that have come, and the time until now."""
        self._stream(history)
        show_data(self.marks, _marks(history))
        # Another range than the one set here: the reader has chosen it.
        if (self._range.start, self._range.end) != self._shown:
            self.windows.active = None
        end_s = max(1.0, history.now_s - history.launched.time_s)
        self._range.bounds = (0, _MS * end_s)
        if self.windows.active is not None:
            clock = "%M:%S" if end_s < 3600 else "%H:%M:%S"
            self._clock.update(seconds=clock, minsec=clock, minutes=clock, hourmin=clock)
            window_s = list(_WINDOWS_S.values())[self.windows.active]
            self._shown = (_MS * max(0.0, end_s - window_s), _MS * end_s)
            if (self._range.start, self._range.end) != self._shown:
                self._range.update(start=self._shown[0], end=self._shown[1])

    def _choose(self, _attr: str, _old: int | None, new: int | None) -> None:
        if new is not None:
            self._shown = (self._range.start, self._range.end)

    def _stream(self, history: History) -> None:
        """Copy the points of the series into the source; only new ones are sent to the browser."""
        series = history.samples.series
        have = len(self.points.data["time_s"])
        # The series was rewritten, so what the browser has is no beginning of it any more.
        if series.version != self._version or have > len(series.columns["time_s"]):
            self._version, have = series.version, 0
            self.points.data = {name: [] for name in self.points.data}
        for name in series.columns.keys() - self.points.data.keys():
            # A new column has no values for the points before it.
            self.points.data[name] = [math.nan] * have
        new = {name: _values(series.columns, name)[have:] for name in series.columns}
        for name in self.points.data.keys() - new.keys():
            # All columns of a source must have one length.
            new[name] = [math.nan] * len(new["time_s"])
        new["time_s"] = [_MS * (time_s - history.launched.time_s) for time_s in new["time_s"]]
        if new["time_s"]:
            self.points.stream(new)


class Chart:
    """Curves over time, below a line with their names and current values.

    Args:
        lines: columns of a history's series, and their labels. A single line is a mean, drawn with
            a band from the lowest node to the highest.
        unit: of the values, behind a space.
        is_from_zero: the axis begins there; otherwise, only if values are near it.
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
        self._is_from_zero, self._is_fixed = is_from_zero, False
        self._head = text_box()
        self._range = DataRange1d(range_padding=0.08, default_span=2)
        if unit == " %":
            self._range.end = 102
        plot = axis.figure(150, y_range=self._range)
        edges = [f"{which} {name}" for which in ("least", "most") for name in lines]
        for name in (*lines, *edges):
            if name not in axis.points.data:
                axis.points.data[name] = [math.nan] * len(axis.points.data["time_s"])
        curves: list[Any] = []
        for color, (name, label) in zip(_COLORS, lines.items(), strict=False):
            band = {"y1": f"least {name}", "y2": f"most {name}"}
            plot.varea("time_s", source=axis.points, color=color, alpha=0.22, **band)
            curve = plot.line("time_s", name, source=axis.points, color=color, width=2, name=label)
            curves.append(curve)
        tips = [("", "$name $snap_y{0,0.[0000]}"), ("after", "$snap_x{%H:%M:%S}")]
        formatters: Any = {"$snap_x": "datetime"}
        plot.add_tools(
            HoverTool(renderers=curves, mode="vline", tooltips=tips, formatters=formatters)
        )
        self.root = Column(self._head, plot, sizing_mode="stretch_width")

    def update(self, history: History) -> None:
        """Say how the curves stand."""
        columns = history.samples.series.columns
        self.root.visible = any(name in columns for name in self.lines)
        said, lowest, highest = [], math.inf, -math.inf
        for color, (name, label) in zip(_COLORS, self.lines.items(), strict=False):
            now = [_last(columns.get(f"{which}{name}", ())) for which in ("", "least ", "most ")]
            spread = f" <i>({now[1]} to {now[2]})</i>" if now[1] else ""
            chip = f'<span style="color:{color}">&#9632;</span>'
            said.append(f"{chip} {escape(label)} <b>{now[0]}{self._unit}</b>{spread}")
            found = [value for value in columns.get(name, ()) if math.isfinite(value)]
            lowest, highest = min(found, default=lowest), max(found, default=highest)
        if self._is_from_zero or 0 <= lowest <= highest / 2:
            self._range.start, self._is_fixed = 0, True
        elif self._is_fixed:  # it fell below 0
            self._range.start = lowest - 0.08 * (highest - lowest)
        show_text(self._head, f"<h2>{escape(self._title)}</h2> {' &ensp; '.join(said)}")


class Stream:
    """Each node's phases over time: one lane a node, with a legend of the colors."""

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
        """Show what nodes have done since."""
        names, start_s = history.launched.nodes, history.launched.time_s
        size = max(1, len(names))
        height = min(_MAX_HEIGHT, max(70, 26 * size))
        rows = history.rows()
        ranks = {row.node_id: at for at, row in enumerate(rows)}
        spans = [span for span in history.spans() if span.end_s > span.start_s]
        known = [(span, *PHASES.get(span.phase, (span.phase, SOFT))) for span in spans]
        data = {
            "y": np.array([size - ranks[span.node_id] - 0.5 for span in spans], float),
            "left": np.array([_MS * (span.start_s - start_s) for span in spans], float),
            "right": np.array([_MS * (span.end_s - start_s) for span in spans], float),
            "color": [color for _, _, color in known],
            "what": [
                f"{names[span.node_id]} {word if size > _MANY else _in_words(span, word)}"
                for span, word, _ in known
            ],
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
    """Return failures in red, other restarts and checkpoints."""
    failed = failures(history)
    marks = [(at, _BAD, "solid", why) for at, why in failed.values()]
    for begun in history.begun:
        if begun.reason and begun.generation - 1 not in failed:
            what = f"attempt {begun.generation + 1}: {begun.reason}"
            marks.append((begun.time_s, "#c9a227", "solid", what))
    marks += [
        (made.time_s, _SAVED, "dashed", f"checkpoint of step {made.step:,}")
        for made in _thinned(history.checkpoints)
    ]
    lines = [(_MS * (at - history.launched.time_s), *rest) for at, *rest in marks]
    return _columns(("x", "color", "dash", "what"), lines)


def _columns(names: Sequence[str], lines: Sequence[Sequence[Any]]) -> dict[str, Any]:
    return {name: [line[at] for line in lines] for at, name in enumerate(names)}


def _thinned(marks: Iterable[Any]) -> list[Any]:
    found = list(marks)
    return found[:: max(1, -(-len(found) // _MAX_MARKS))]


def _values(columns: Mapping[str, Sequence[float]], name: str) -> list[float]:
    """Return a column; of the edges of a band, without gaps, which an area cannot have."""
    which, _, of = name.partition(" ")
    if which not in ("least", "most"):
        return list(columns[name])
    filled, before = [], math.nan
    for value, mean in zip(columns[name], columns[of], strict=True):
        is_end = math.isnan(value) or math.isnan(before)
        filled.append((before if math.isnan(mean) else mean) if is_end else value)
        before = mean
    return filled


def _legend(phases: set[str]) -> str:
    shown = {word: color for phase, (word, color) in PHASES.items() if phase in phases}
    chips = [f'<span style="color:{c}">&#9632;</span> {escape(w)}' for w, c in shown.items()]
    lines = {"failure": _BAD, "checkpoint": _SAVED}
    chips += [f'<span style="color:{color}">&#9474;</span> {w}' for w, color in lines.items()]
    return (
        f'<h2>Nodes</h2> <span class="chips">{"".join(f"<span>{c}</span>" for c in chips)}</span>'
    )


def _in_words(span: NodeSpan, word: str) -> str:
    steps = f", steps {span.first_step:,} to {span.last_step:,}" if span.last_step >= 0 else ""
    return f"{word} for {duration(span.end_s - span.start_s)}{steps}"


def _last(column: Sequence[float]) -> str:
    """Return the last known value in digits; empty for none."""
    last = next((value for value in reversed(column) if not math.isnan(value)), math.nan)
    return "" if math.isnan(last) else f"{last:,.0f}" if abs(last) >= 1000 else f"{last:.3g}"
