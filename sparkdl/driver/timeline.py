"""One trace of a whole cluster, for Perfetto: what its nodes do when, by the driver's clock.

Runs in: driver

What the driver knows (states, failures, checkpoints, how far the launch of each node is) is of use
when a node was killed; what children tell (steps, waits, collectives) comes with their control
connections, twice a second at most. A thread writes: nothing waits for it, and if the disk is full
the trace ends there.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from sparkdl.control.messages import (
    AskClock,
    ChildFailed,
    ChildReturned,
    ChildRunning,
    ClockTold,
    FromAgent,
    Hello,
    Offer,
    Traced,
)
from sparkdl.control.trace_file import (
    Event,
    TraceFile,
    TrackIds,
    complete,
    instant,
    named_process,
)
from sparkdl.core.spec import ClusterSpec
from sparkdl.dashboard.events import AnyEvent, Changed, Checkpoint, Problem
from sparkdl.driver.clocks import HostClock
from sparkdl.driver.controller import Controller
from sparkdl.driver.dashboard import Seen
from sparkdl.driver.lifecycle import state as states
from sparkdl.driver.log_files import writable
from sparkdl.version import __version__

_log = logging.getLogger(__name__)

_PERIOD_S = 1.0
_NODES_PER_S = 2000
"""Of more nodes, the file is written more seldom."""
_END_S = 10.0
_MAX_SPANS = 200_000
"""That wait while nothing can be written; what comes then is dropped."""
_FIRST_ANSWERS = 4
"""Of a host that has just joined: the fastest of them counts."""
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


class Timeline(threading.Thread):
    """Writes the trace of one cluster, from before its start until its controller is closed.

    Args:
        path: see `check_file`.

    Raises:
        OSError: if the file cannot be written.
    """

    def __init__(self, controller: Controller, path: str) -> None:
        spec = controller.spec
        super().__init__(name=f"sparkdl-timeline-{spec.cluster_id}", daemon=True)
        self._file: TraceFile | None = TraceFile(path)
        self._now_us: Callable[[], int] = lambda: round(controller.wall_s() * 1e6)
        self._tracks = Tracks(spec, self._now_us())
        self._period_s = max(_PERIOD_S, len(spec.nodes) / _NODES_PER_S)
        self._seen = Seen(spec.cluster_id)
        self._news: deque[Callable[[], Iterator[Event]]] = deque([self._tracks.begin])
        self._waiting = 0
        self._nodes: dict[str, int] = {}
        self._asked: dict[str, int] = {}
        self._ends = threading.Event()
        self._is_over = False
        self._note(controller.view.state)
        controller.follow(self._note)
        controller.overhear(self)
        atexit.register(self.close)

    def heard(
        self, agent_id: str, node_id: int | None, message: FromAgent | None
    ) -> AskClock | None:
        """See `Ear.heard`."""
        now_us, tracks = self._now_us(), self._tracks
        if isinstance(message, Hello):
            self._nodes[agent_id] = message.node_id
        of = self._nodes.get(agent_id)
        if of is None or self._is_over:
            return None
        if isinstance(message, ClockTold):
            self._news.append(partial(tracks.measured, agent_id, of, message, now_us))
            self._asked[agent_id] = self._asked.get(agent_id, 0) + 1
            return AskClock(now_us) if self._asked[agent_id] < _FIRST_ANSWERS else None
        if isinstance(message, Traced):
            if self._waiting + len(message.spans) > _MAX_SPANS:
                dropped = message.dropped + len(message.spans)
                message = Traced(message.generation, (), dropped)
            self._waiting += len(message.spans)
            self._news.append(partial(tracks.told, agent_id, of, message, now_us))
            return AskClock(now_us)
        if node_id is not None:
            self._news.append(partial(tracks.reached, node_id, message, now_us))
        return AskClock(now_us) if isinstance(message, Hello) else None

    def run(self) -> None:
        """Write what is new once a second, or more seldom of thousands of nodes."""
        try:
            has_ended = False
            while not has_ended:
                has_ended = self._ends.wait(self._period_s)
                self._write()
        except Exception:  # noqa: BLE001 (whatever it is, the training does not need this)
            _log.exception("The timeline ends here, and the cluster goes on")
        finally:
            self._is_over = True
            self._news.clear()
            self._close_file()

    def close(self) -> None:
        """Write what is left, for ten seconds at most; the program may end then."""
        atexit.unregister(self.close)
        self._ends.set()
        if self.is_alive():
            self.join(_END_S)
            if self.is_alive():
                _log.warning("The disk of the timeline is slow: its end may be missing")

    def _note(self, state: states.State) -> None:
        """Note a state, on the controller's thread."""
        now_us, tracks = self._now_us(), self._tracks
        for event in self._seen.news(state, now_us / 1e6):
            self._news.append(partial(tracks.happened, event, now_us))

    def _write(self) -> None:
        events: list[Event] = []
        while self._news:
            events += self._news.popleft()()
        self._waiting = 0
        if self._file is None:
            return
        tracks = self._tracks
        try:
            self._file.write(events, tracks.open_events(self._now_us()), tracks.about())
        except OSError as error:
            _log.warning("The timeline %s ends here: %s", self._file.path, error)
            self._close_file()

    def _close_file(self) -> None:
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

    def begin(self) -> Iterator[Event]:
        """Yield the names of the nodes, and begin their launch."""
        yield from named_process(f"cluster {self._spec.cluster_id}", self._cluster, 0)
        for node in self._spec.nodes:
            pid = self._pid(node.node_id)
            yield from named_process(node.name, pid, node.node_id + 1)
            yield from self._begin(pid, _PHASES, "start agent", "launch", 0, {})

    def happened(self, event: AnyEvent, now_us: int) -> Iterator[Event]:
        """Yield what a state of the cluster means."""
        at_us, pid = now_us - self._zero_us, self._cluster
        if isinstance(event, Checkpoint):
            args = {"url": event.url}
            yield from self._at(pid, _STATE, f"checkpoint {event.step}", "checkpoint", at_us, args)
        if not isinstance(event, Changed):
            return
        known: _Args = {"generation": event.generation} if event.generation >= 0 else {}
        known |= {"reason": event.reason} if event.reason else {}
        yield from self._begin(pid, _STATE, event.state, "state", at_us, known)
        for problem in event.problems:
            if (event.generation, problem) not in self._problems:
                self._problems.add((event.generation, problem))
                about: _Args = {"node": problem.node, "text": problem.text[:_MAX_CHARS]}
                yield from self._at(pid, _STATE, problem.headline, "failure", at_us, about)
        for place in event.places if event.state == "running" else ():
            own = self._pid(place.node_id)
            at: _Args = {"host": place.host, "rank": place.rank, "generation": event.generation}
            yield from self._begin(own, _PHASES, "prepare", "launch", at_us, at)

    def reached(self, node_id: int, message: FromAgent | None, now_us: int) -> Iterator[Event]:
        """Yield what it means for a node's phases that its agent has said something, or left."""
        pid, at_us = self._pid(node_id), now_us - self._zero_us
        match message:
            case Hello(host=host):
                yield from self._begin(pid, _PHASES, "gather", "launch", at_us, {"host": host})
            case Offer(generation):
                about: _Args = {"generation": generation}
                yield from self._begin(pid, _PHASES, "gather", "launch", at_us, about)
            case ChildRunning(generation):
                about = {"generation": generation}
                yield from self._begin(pid, _PHASES, "train", "train", at_us, about)
            case ChildReturned():
                yield from self._finish(pid, _PHASES, at_us)
            case ChildFailed(_, failure):
                yield from self._fail(pid, failure.headline(), at_us)
            case None if (pid, _PHASES) in self._open:
                yield from self._fail(pid, "its agent left", at_us)

    def measured(
        self, agent_id: str, node_id: int, answer: ClockTold, now_us: int
    ) -> Iterator[Event]:
        """Take what an agent's clock said; there is no event of that."""
        clock = self._clocks.setdefault(agent_id, HostClock())
        clock.sample(answer.sent_us, answer.local_us, now_us)
        self._errors_us[self._name(node_id)] = clock.error_us
        yield from ()

    def told(self, agent_id: str, node_id: int, told: Traced, now_us: int) -> Iterator[Event]:
        """Yield the spans of a child, by the driver's clock."""
        clock, pid = self._clocks.get(agent_id), self._pid(node_id)
        dropped = told.dropped
        for span in told.spans:
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
            self._dropped[self._name(node_id)] += dropped
            text = f"{dropped} spans were dropped"
            yield from self._at(pid, _PHASES, text, "dropped", now_us - self._zero_us)

    def open_events(self, now_us: int) -> Iterator[Event]:
        """Yield the spans that have not ended, as far as they are now."""
        for (pid, track), begun in self._open.items():
            yield self._complete(pid, track, begun, now_us - self._zero_us)

    def about(self) -> dict[str, Any]:
        """Return what is to be known of the whole trace."""
        return {
            "cluster": self._spec.cluster_id,
            "sparkdl": __version__,
            "began_unix_s": self._zero_us / 1e6,
            "clock_error_us": self._errors_us,
            "dropped_spans": dict(self._dropped),
        }

    def _begin(
        self, pid: int, track: str, name: str, category: str, at_us: int, args: _Args
    ) -> Iterator[Event]:
        """End what is open and begin something else; of the same, add what is known of it."""
        before = self._open.get((pid, track))
        if before and before.name == name and _generations(before.args, args) < 2:
            self._open[pid, track] = replace(before, args=before.args | args)
            return
        yield from self._finish(pid, track, at_us)
        yield from self._named(pid, track)
        self._open[pid, track] = _Begun(name, category, at_us, args)

    def _fail(self, pid: int, why: str, at_us: int) -> Iterator[Event]:
        yield from self._finish(pid, _PHASES, at_us, {"failure": why})
        yield from self._at(pid, _PHASES, why, "failure", at_us)

    def _finish(
        self, pid: int, track: str, at_us: int, args: _Args | None = None
    ) -> Iterator[Event]:
        begun = self._open.pop((pid, track), None)
        if begun is not None:
            yield from self._named(pid, track)
            yield self._complete(pid, track, begun, at_us, args)

    def _complete(
        self, pid: int, track: str, begun: _Begun, at_us: int, args: _Args | None = None
    ) -> Event:
        at = pid, self._ids.tid(pid, track), begun.start_us, max(0, at_us - begun.start_us)
        return complete(begun.name, begun.category, *at, {**begun.args, **(args or {})})

    def _at(
        self, pid: int, track: str, name: str, category: str, at_us: int, args: Any = None
    ) -> Iterator[Event]:
        yield from self._named(pid, track)
        yield instant(name, category, pid, self._ids.tid(pid, track), at_us, args)

    def _named(self, pid: int, track: str | int, told: Traced | None = None) -> Iterator[Event]:
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
