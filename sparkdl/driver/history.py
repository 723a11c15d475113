"""The past and present of a cluster, folded from its events. Pure; its size is bounded.

Runs in: driver, dashboard
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from sparkdl.driver.events import Changed, Checkpoint, Event, Launched, Location, Problem, Sampled

MAX_POINTS = 1000
"""Points of a curve. At twice as many, every other one is dropped: memory stays bounded."""
_MAX_SPANS = 20_000
_MAX_EVENTS = 1000
_MAX_CLUSTERS = 20
_RECENT_S = 60.0
_MAX_RECENT = 61
_PLOTTED = {"cores": 1.0, "gpu": 100.0, "memory_nbytes": 2**-30, "gpu_nbytes": 2**-30}
"""The parts of a node's load with curves, and their scale: cores, percent, GiB."""
TRAINING = "in map_fun"
ENDED = ("finished", "failed", "stopping", "stopped")


class Series:
    """Curves over the time of a run: named columns of the same length, `time_s` among them."""

    def __init__(self) -> None:
        self.columns: dict[str, list[float]] = {"time_s": []}
        self.version = 0
        """Changes when points have been dropped."""
        self._every, self._skipped = 1, 0

    def add(self, time_s: float, values: Mapping[str, float]) -> None:
        self._skipped += 1
        if self._skipped < self._every:
            return
        self._skipped = 0
        times = self.columns["time_s"]
        for name in values.keys() - self.columns.keys():
            self.columns[name] = [float("nan")] * len(times)
        times.append(time_s)
        for name, column in self.columns.items():
            if name != "time_s":
                column.append(values.get(name, float("nan")))
        if len(times) >= 2 * MAX_POINTS:
            self.columns = {name: column[::2] for name, column in self.columns.items()}
            self._every *= 2
            self.version += 1


@dataclass
class Span:
    """A phase of a node, with the first and last step reported in it; -1 for none."""

    node_id: int
    phase: str
    start_s: float
    end_s: float
    first_step: int = -1
    last_step: int = -1


@dataclass(frozen=True)
class NodeRow:
    """A node's row in the table.

    Attributes:
        used: rows of all epochs; a row counts once for each epoch.
        rate: steps, or else batches, in a second of the last minute.
        waits: shares of the last minute in which it waited for `rows`, and for `others`.
        load: its use of CPU, memory and GPU; see `NodeLoad`.
    """

    node_id: int
    name: str
    rank: int = -1
    host: str = ""
    pid: int = 0
    state: str = "starting"
    step: int = -1
    received: int = 0
    used: int = 0
    epochs: int = 0
    rate: float = float("nan")
    waits: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    load: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""

    @property
    def step_s(self) -> float:
        """How long a step takes, as a mean of the last minute; NaN where there is none."""
        return 1 / self.rate if self.rate > 0 else math.nan


class Phases:
    def __init__(self) -> None:
        self._ended: deque[Span] = deque(maxlen=_MAX_SPANS)
        self._open: dict[int, Span] = {}

    def note(self, node_id: int, phase: str, time_s: float, step: int = -1) -> None:
        span = self._open.get(node_id)
        if span is None or span.phase != phase:
            if span is not None:
                span.end_s = time_s
                self._ended.append(span)
            span = self._open[node_id] = Span(node_id, phase, time_s, time_s)
        if step >= 0:
            span.last_step = step
            if span.first_step < 0:
                span.first_step = step

    def until(self, end_s: float) -> Iterator[Span]:
        yield from self._ended
        for span in self._open.values():
            yield replace(span, end_s=max(span.start_s, end_s))


class Samples:
    """How far the nodes are, and how fast: the last minute of one generation."""

    def __init__(self) -> None:
        self.last: Sampled | None = None
        self.series = Series()
        self._recent: deque[Sampled] = deque(maxlen=_MAX_RECENT)
        self._waits: tuple[Mapping[str, list[float]], Mapping[str, list[float]]] = {}, {}
        """In the first and in the last of them."""

    def restart(self) -> None:
        """Begin another generation, whose counts begin at 0."""
        self._recent.clear()
        self._waits = {}, {}

    def add(self, event: Sampled) -> None:
        before, is_later = self.last, bool(self._recent)
        self.last = event
        self._recent.append(event)
        while event.time_s - self._recent[0].time_s > _RECENT_S:
            self._recent.popleft()
        waits = [sample.waits for sample in self._recent if sample.waits] or [{}]
        self._waits = waits[0], waits[-1]
        waited = [self.waits(at).get("rows") for at in range(len(event.states))]
        known = [share for share in waited if share is not None]
        values = {"without rows": 100 * statistics.fmean(known)} if known else {}
        if before is not None and is_later and event.time_s > before.time_s:
            span_s = event.time_s - before.time_s
            now, then = _rows(event), _rows(before)
            for name, index in (("rows in", 0), ("rows used", 1)) if event.feeds else ():
                values[name] = max(0.0, (now[index] - then[index]) / span_s)
        self.series.add(event.time_s, {**values, **_values(event)})

    def rate(self, at: int) -> float:
        """Return how many steps a node takes in a second: those it reports, or else its batches."""
        if not self._recent:
            return math.nan
        last = self._recent[-1]
        does_report = last.steps[at] >= 0
        first = next(each for each in self._recent if (each.steps[at] >= 0) is does_report)
        span_s = last.time_s - first.time_s
        return max(0, _steps(last, at) - _steps(first, at)) / span_s if span_s > 0 else math.nan

    def waits(self, at: int) -> dict[str, float]:
        """Return the shares of the last minute that a node has waited, by what for."""
        first, last = self._waits
        waited = {
            name: column[at] - max(0.0, first[name][at])
            for name, column in last.items()
            if column[at] >= 0
        }
        watched_s = waited.pop("watched", 0.0)
        return {name: s / watched_s for name, s in waited.items()} if watched_s > 0 else {}


class History:
    """One cluster's past and present.

    Attributes:
        changed: the last change of the state.
        state: as in `Changed`, but `finished` and `failed` remain when the cluster is stopped.
        problems: of all generations: time, generation, problem.
        begun: the change to each generation that has begun.
    """

    def __init__(self, cluster: str, time_s: float) -> None:
        self.launched = Launched(cluster, time_s, "", ())
        self.changed = Changed(cluster, time_s, "gathering", status="Gathering")
        self.state = self.changed.state
        self.now_s = time_s
        self.ended_s: float | None = None
        self.problems: deque[tuple[float, int, Problem]] = deque(maxlen=_MAX_EVENTS)
        self.begun: deque[Changed] = deque(maxlen=_MAX_EVENTS)
        self.checkpoints: deque[Checkpoint] = deque(maxlen=_MAX_EVENTS)
        self.samples = Samples()
        self.phases = Phases()
        self._rows: list[NodeRow] | None = None
        """The last result of `rows`, for several readers."""

    @property
    def elapsed_s(self) -> float:
        return (self.ended_s or self.now_s) - self.launched.time_s

    def spans(self) -> Iterator[Span]:
        return self.phases.until(self.now_s if self.ended_s is None else self.ended_s)

    def add(self, event: Event) -> None:
        self.now_s = max(self.now_s, event.time_s)
        self._rows = None
        match event:
            case Launched() if event != self.launched:
                self.launched = event
                for node_id in range(len(event.nodes)):
                    self.phases.note(node_id, "starting", event.time_s)
            case Changed():
                self._change(event)
            case Sampled():
                self.samples.add(event)
                for node_id, (state, step) in enumerate(
                    zip(event.states, event.steps, strict=True)
                ):
                    self.phases.note(
                        node_id, state, event.time_s, step if state == TRAINING else -1
                    )
            case Checkpoint():
                self.checkpoints.append(event)

    def rows(self) -> list[NodeRow]:
        if self._rows is None:
            self._rows = self._new_rows()
        return self._rows

    def _new_rows(self) -> list[NodeRow]:
        begun = self.begun[-1] if self.begun else self.changed
        locations = {location.node_id: location for location in begun.locations}
        since_s = self.begun[-1].time_s if self.begun else -math.inf
        failed = {each.node: each for time_s, _, each in self.problems if time_s >= since_s}
        rows = [
            self._row(node_id, locations.get(node_id), failed.get(name))
            for node_id, name in enumerate(self.launched.nodes)
        ]
        return sorted(rows, key=lambda row: (row.rank < 0, row.rank, row.node_id))

    def _change(self, event: Changed) -> None:
        last = self.begun[-1].generation if self.begun else -1
        if event.generation != last and (event.state == "running" or event.locations):
            self.begun.append(event)
            self.samples.restart()
            for location in event.locations:
                self.phases.note(location.node_id, "preparing", event.time_s)
        self.changed = event
        if event.state not in ("stopping", "stopped") or self.state not in ("finished", "failed"):
            self.state = event.state
        known = {problem for _, _, problem in self.problems}
        for problem in event.problems:
            if problem not in known:
                self.problems.append((event.time_s, event.generation, problem))
            if problem.node in self.launched.nodes:
                node_id = self.launched.nodes.index(problem.node)
                self.phases.note(node_id, "failed", event.time_s)
        if event.state in ENDED and self.ended_s is None:
            self.ended_s = event.time_s

    def _row(self, at: int, location: Location | None, problem: Problem | None) -> NodeRow:
        sample = self.samples.last
        row = NodeRow(
            at,
            self.launched.nodes[at],
            *((location.rank, location.host) if location else (-1, "")),
            state="failed" if problem else "starting",
            problem=problem.headline if problem else "",
        )
        if sample is None:
            return row
        feeds = sample.feeds.values()
        return replace(
            row,
            pid=sample.pids[at],
            state=sample.states[at],
            step=sample.steps[at],
            received=sum(feed.received[at] for feed in feeds),
            used=sum(feed.used[at] for feed in feeds),
            epochs=max((feed.epochs[at] for feed in feeds), default=0),
            rate=self.samples.rate(at),
            metrics={
                name: value
                for name, column in sample.metrics.items()
                if (value := column[at]) is not None
            },
            load={name: column[at] for name, column in sample.load.items()},
            waits=self.samples.waits(at),
        )


class Clusters:
    """The clusters of a program, the newest last; the oldest are forgotten."""

    def __init__(self) -> None:
        self.histories: dict[str, History] = {}

    def add(self, event: Event) -> None:
        history = self.histories.get(event.cluster)
        if history is None:
            history = self.histories[event.cluster] = History(event.cluster, event.time_s)
            while len(self.histories) > _MAX_CLUSTERS:
                del self.histories[next(iter(self.histories))]
        history.add(event)

    def get(self, cluster: str | None = None) -> History | None:
        """Return a cluster's history; the newest one's if it is not named or not known."""
        newest = next(reversed(self.histories.values()), None)
        return self.histories.get(cluster or "", newest)


def _rows(sample: Sampled) -> tuple[int, int]:
    rows = [
        (received, used)
        for feed in sample.feeds.values()
        for state, received, used in zip(sample.states, feed.received, feed.used, strict=True)
        if state == TRAINING
    ]
    return sum(received for received, _ in rows), sum(used for _, used in rows)


def _values(sample: Sampled) -> dict[str, float]:
    values: dict[str, float] = {}
    if steps := [step for step in sample.steps if step >= 0]:
        values["step"] = float(max(steps))
    columns = {f"metric {name}": column for name, column in sample.metrics.items()}
    for name in sample.load.keys() & _PLOTTED.keys():
        taken = zip(sample.load[name], sample.pids, strict=True)
        columns[name] = [_PLOTTED[name] * value if pid > 0 else None for value, pid in taken]
    for name, column in columns.items():
        if found := [value for value in column if value is not None]:
            values[name] = statistics.fmean(found)
            if len(found) > 1:
                values[f"least {name}"], values[f"most {name}"] = min(found), max(found)
    return values


def _steps(sample: Sampled, at: int) -> int:
    """Return how many steps a node has taken: those it has reported, or else its batches."""
    reported = sample.steps[at]
    return reported if reported >= 0 else sum(f.steps[at] for f in sample.feeds.values())
