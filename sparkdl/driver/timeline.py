"""One trace of a whole cluster for Perfetto, by the driver's clock.

Runs in: driver

The driver's own events (states, failures, checkpoints, launch phases of each node) remain when a
node was killed. The children's spans (steps, waits, collectives) come over the control connections,
at most twice a second. A thread writes: nothing waits for it, and if the disk is full the trace
ends there.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from typing import Any

from msgspec.structs import replace

from sparkdl.control.messages import Traced
from sparkdl.control.trace_file import Event as TraceEvent
from sparkdl.control.trace_file import TraceFile, TrackIds, complete, instant, named_process
from sparkdl.core.spec import ClusterSpec
from sparkdl.driver.clocks import HostClock
from sparkdl.driver.controller import Controller
from sparkdl.driver.events import (
    Changed,
    Checkpoint,
    ClockRead,
    Ended,
    Event,
    NodeMoved,
    Problem,
    Spanned,
)
from sparkdl.driver.log_files import writable
from sparkdl.driver.stream import Batches, period_s
from sparkdl.version import __version__

_log = logging.getLogger(__name__)

_MAX_SPANS = 200_000
"""Waiting while nothing can be written; further ones are dropped."""
_MAX_CHARS = 2000
_Args = dict[str, Any]
_PHASES, _STATE = "phases", "state"


def check_file(option: str, path: str | os.PathLike[str]) -> str:
    """Make an empty trace, and return its absolute path.

    Args:
        option: of the launch that names it.

    Raises:
        ConfigError: if it is no path of this machine, or cannot be written to.
    """
    with writable(option, path, "file") as own:
        os.makedirs(os.path.dirname(own), exist_ok=True)
        TraceFile(own).close()
    return own


class Timeline(Batches):
    """Writes the trace of one cluster, from before its start until its controller is closed.

    Args:
        path: see `check_file`.

    Raises:
        OSError: if the file cannot be written.
    """

    end_s = 10.0

    def __init__(self, controller: Controller, path: str) -> None:
        spec = controller.spec
        super().__init__(
            "The timeline", f"sparkdl-timeline-{spec.cluster_id}", period_s(len(spec.nodes))
        )
        self._file: TraceFile | None = TraceFile(path)
        self._now_us: Callable[[], int] = lambda: round(controller.events.now_s() * 1e6)
        self._tracks = Tracks(spec, self._now_us())
        self._trace = [*self._tracks.begin()]
        self._waiting = 0
        kinds = Changed, Checkpoint, NodeMoved, ClockRead, Spanned, Ended
        controller.events.subscribe(self.put, *kinds)
        # A program that ends without a shutdown keeps its last events, too.
        atexit.register(self.close)

    def put(self, event: Event) -> None:
        """Queue an event; drop spans when too many wait for the disk."""
        if isinstance(event, Spanned):
            traced = event.traced
            if self._waiting + len(traced.spans) > _MAX_SPANS:
                # The number stays, so that the trace says how many spans are missing.
                lost = Traced(traced.generation, (), traced.dropped + len(traced.spans))
                event = replace(event, traced=lost)
            # Counted here, because the bound of the queue counts events and one holds many spans.
            self._waiting += len(event.traced.spans)
        super().put(event)

    def close(self) -> None:
        """Write the remaining events, for ten seconds at most, since the program may be ending."""
        atexit.unregister(self.close)
        super().close()
        if self.is_alive():
            _log.warning(
                "The disk of the timeline is slow: its end may be missing. Give timeline= a path "
                "on a faster disk"
            )

    def _take(self, events: Sequence[Event], is_last: bool) -> None:
        for event in events:
            self._trace += self._tracks.add(event)
        # Before the write, which may take long: spans that come meanwhile wait for the next one.
        self._waiting, trace, self._trace = 0, self._trace, []
        if self._file is None:
            return
        tracks = self._tracks
        try:
            self._file.write(trace, tracks.open_events(self._now_us()), tracks.about())
        except OSError as error:
            _log.warning(
                "The timeline %s ends here: %s. The training continues; make room, or give "
                "timeline= another path",
                self._file.path,
                error,
            )
            self._finish()

    def _finish(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


@dataclass(frozen=True)
class _Begun:
    """A span that has not ended."""

    name: str
    category: str
    start_us: int
    args: _Args = field(default_factory=dict)


class Tracks:
    """Where in the trace a cluster's events belong. Pure: all times are given, in microseconds.

    Args:
        zero_us: when the launch began, which is 0 in the trace.
    """

    def __init__(self, spec: ClusterSpec, zero_us: int) -> None:
        self._spec = spec
        self._zero_us = zero_us
        self._cluster = len(spec.nodes) + 1
        self._clocks: dict[str, HostClock] = {}
        self._open: dict[tuple[int, str], _Begun] = {}
        self._ids = TrackIds()
        self._dropped: Counter[str] = Counter()
        self._errors_us: dict[str, int] = {}
        self._problems: set[tuple[int, Problem]] = set()

    def begin(self) -> Iterator[TraceEvent]:
        """Yield the names of the nodes, and begin their launch."""
        yield from named_process(f"cluster {self._spec.cluster_id}", self._cluster, 0)
        for node in self._spec.nodes:
            pid = self._pid(node.node_id)
            yield from named_process(node.name, pid, node.node_id + 1)
            yield from self._begin(pid, _PHASES, "start agent", "launch", 0, {})

    def add(self, event: Event) -> Iterator[TraceEvent]:
        """Yield the trace events for an event of the cluster."""
        at_us = round(event.time_s * 1e6) - self._zero_us
        match event:
            case Checkpoint(url=url, step=step):
                at = self._cluster, _STATE
                yield from self._at(*at, f"checkpoint {step}", "checkpoint", at_us, {"url": url})
            case Changed():
                yield from self._change(event, at_us)
            case NodeMoved():
                yield from self._move(event, self._pid(event.node_id), at_us)
            case ClockRead(agent_id=agent_id):
                clock = self._clocks.setdefault(agent_id, HostClock())
                clock.sample(event.sent_us, event.local_us, at_us + self._zero_us)
                self._errors_us[self._name(event.node_id)] = clock.error_us
            case Spanned():
                yield from self._span(event, self._pid(event.node_id), at_us)

    def _change(self, event: Changed, at_us: int) -> Iterator[TraceEvent]:
        pid = self._cluster
        known: _Args = {"generation": event.generation} if event.generation >= 0 else {}
        known |= {"reason": event.reason} if event.reason else {}
        yield from self._begin(pid, _STATE, event.state, "state", at_us, known)
        for problem in event.problems:
            # Each change of the state names all failures so far.
            if (event.generation, problem) not in self._problems:
                self._problems.add((event.generation, problem))
                about: _Args = {"node": problem.node, "text": problem.text[:_MAX_CHARS]}
                yield from self._at(pid, _STATE, problem.headline, "failure", at_us, about)
        for place in event.places if event.state == "running" else ():
            own = self._pid(place.node_id)
            at: _Args = {"host": place.host, "rank": place.rank, "generation": event.generation}
            yield from self._begin(own, _PHASES, "prepare", "launch", at_us, at)

    def _move(self, event: NodeMoved, pid: int, at_us: int) -> Iterator[TraceEvent]:
        """Yield the changes of a node's phase after its agent's message or end."""
        about: _Args = {"generation": event.generation}
        match event.phase:
            case "joined":
                about = {"host": event.host}
                yield from self._begin(pid, _PHASES, "gather", "launch", at_us, about)
            case "offered":
                yield from self._begin(pid, _PHASES, "gather", "launch", at_us, about)
            case "entered":
                yield from self._begin(pid, _PHASES, "train", "train", at_us, about)
            case "returned":
                yield from self._finish(pid, _PHASES, at_us)
            case "failed":
                yield from self._fail(pid, event.problem, at_us)
            case "left" if (pid, _PHASES) in self._open:
                yield from self._fail(pid, "its agent left", at_us)

    def _span(self, event: Spanned, pid: int, at_us: int) -> Iterator[TraceEvent]:
        """Yield the spans of a child, by the driver's clock."""
        clock, told = self._clocks.get(event.agent_id), event.traced
        dropped = told.dropped
        for span in told.spans:
            # Times of this host cannot be converted yet.
            if clock is None or not clock.is_known:
                dropped += 1
                continue
            start_us = clock.driver_us(span.start_us) - self._zero_us
            stop_us = clock.driver_us(span.start_us + span.duration_us) - self._zero_us
            if stop_us < 0:
                continue  # a zygote's, of before the launch
            start_us = max(0, start_us)
            yield from self._named(pid, span.track, told)
            at = pid, self._ids.tid(pid, span.track), start_us, stop_us - start_us
            yield complete(span.name, span.category, *at, span.args)
        if dropped:
            self._dropped[self._name(event.node_id)] += dropped
            text = f"{dropped} spans were dropped"
            yield from self._at(pid, _PHASES, text, "dropped", at_us)

    def open_events(self, now_us: int) -> Iterator[TraceEvent]:
        """Yield the open spans up to now."""
        for (pid, track), begun in self._open.items():
            yield self._complete(pid, track, begun, now_us - self._zero_us)

    def about(self) -> dict[str, Any]:
        """Return metadata of the whole trace."""
        return {
            "cluster": self._spec.cluster_id,
            "sparkdl": __version__,
            "began_unix_s": self._zero_us / 1e6,
            "clock_error_us": self._errors_us,
            "dropped_spans": dict(self._dropped),
        }

    def _begin(
        self, pid: int, track: str, name: str, category: str, at_us: int, args: _Args
    ) -> Iterator[TraceEvent]:
        """End the open span and begin a new one; if it has the same name, add to its arguments."""
        before = self._open.get((pid, track))
        # Several messages may report one phase. In another generation it is another phase.
        if before and before.name == name and _generations(before.args, args) < 2:
            self._open[pid, track] = replaced(before, args=before.args | args)
            return
        yield from self._finish(pid, track, at_us)
        yield from self._named(pid, track)
        self._open[pid, track] = _Begun(name, category, at_us, args)

    def _fail(self, pid: int, why: str, at_us: int) -> Iterator[TraceEvent]:
        yield from self._finish(pid, _PHASES, at_us, {"failure": why})
        yield from self._at(pid, _PHASES, why, "failure", at_us)

    def _finish(
        self, pid: int, track: str, at_us: int, args: _Args | None = None
    ) -> Iterator[TraceEvent]:
        begun = self._open.pop((pid, track), None)
        if begun is not None:
            yield from self._named(pid, track)
            yield self._complete(pid, track, begun, at_us, args)

    def _complete(
        self, pid: int, track: str, begun: _Begun, at_us: int, args: _Args | None = None
    ) -> TraceEvent:
        at = pid, self._ids.tid(pid, track), begun.start_us, max(0, at_us - begun.start_us)
        return complete(begun.name, begun.category, *at, {**begun.args, **(args or {})})

    def _at(
        self, pid: int, track: str, name: str, category: str, at_us: int, args: Any = None
    ) -> Iterator[TraceEvent]:
        yield from self._named(pid, track)
        yield instant(name, category, pid, self._ids.tid(pid, track), at_us, args)

    def _named(
        self, pid: int, track: str | int, told: Traced | None = None
    ) -> Iterator[TraceEvent]:
        """Yield the name of a track, once."""
        name = ""
        if told is not None and isinstance(track, int):
            name = f"{told.threads.get(track, 'thread')}, generation {told.generation}"
        yield from self._ids.named(pid, track, name)

    def _pid(self, node_id: int) -> int:
        return node_id + 1

    def _name(self, node_id: int) -> str:
        nodes = self._spec.nodes
        return nodes[node_id].name if 0 <= node_id < len(nodes) else f"node {node_id}"


def _generations(*args: _Args) -> int:
    """Return how many different generations are named."""
    return len({each["generation"] for each in args if "generation" in each})
