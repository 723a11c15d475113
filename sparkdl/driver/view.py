"""The controller's view of its cluster, and the events that describe its changes. Pure.

Children report how many seconds they have waited so far (`node/waits.py`). `Waits` turns them into
shares of the last minute, for pages and records. In a synchronous training a step lasts equally
long on all nodes; the straggler is the one that does not wait while the others do.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparkdl.control.messages import BoardStarted, NodeActive, NodeLoad, Spooled
from sparkdl.control.rows import FeedCount
from sparkdl.core.failure import Failure
from sparkdl.core.spec import ClusterSpec
from sparkdl.core.world import CheckpointRef, World
from sparkdl.driver.events import (
    Changed,
    Checkpoint,
    FeedColumns,
    Launched,
    Place,
    Problem,
    Sampled,
)
from sparkdl.driver.lifecycle import state as states

SLICE_S = 10.0
SLICES = 6
"""Full slices: the last minute. A node counts as awaited if it is in most of them, so that a
checkpoint or the end of an epoch does not make it a straggler."""
AWAITED = 0.3
"""A node is awaited if the others' share of time spent waiting for nodes is higher by this."""
_WAITED = ("watched_s", "rows_s", "others_s")
"""The counters in children's reports, see `NodeActive`."""


@dataclass(frozen=True)
class Shares:
    """Shares of the last minute that a node has waited.

    Attributes:
        rows: for rows.
        others: for other nodes; NaN if unknown.
        lag: how much longer the others waited for nodes, if they wait for this one; otherwise 0.
    """

    rows: float
    others: float
    lag: float = 0.0


class Waits:
    """The waits of one generation's nodes in the last minute."""

    def __init__(self) -> None:
        self._generation = -1
        self._newest = 0
        self._totals: dict[int, NodeActive] = {}
        self._slices: dict[int, dict[int, np.ndarray[Any, Any]]] = {}
        """Seconds that were watched, waited for rows, and for others, by node id and number."""

    def note(self, node_id: int, active: NodeActive, now_s: float) -> None:
        if active.generation < self._generation:
            return
        if active.generation > self._generation:
            self._totals.clear()
            self._slices.clear()
            self._generation = active.generation
        before = self._totals.get(node_id)
        if before is None or active.watched_s < before.watched_s:  # another child
            # A first report counts from 0. The default of `others_s` would mean that it is unknown.
            before = NodeActive(active.generation, others_s=0.0)
        self._totals[node_id] = active
        self._newest = number = max(self._newest, int(now_s // SLICE_S))
        slices = self._slices.setdefault(node_id, {})
        slices[number] = slices.get(number, 0.0) + _seconds(active) - _seconds(before)
        for old in [each for each in slices if each < number - SLICES]:
            del slices[old]

    def shares(self, node_ids: Collection[int]) -> dict[int, Shares]:
        """Return the waits of these nodes that have reported in the last minute."""
        found = {}
        lags = self.lags(node_ids)
        for node_id in node_ids:
            slices = self._slices.get(node_id, {}).items()
            recent = [part for number, part in slices if number >= self._newest - SLICES]
            watched_s, rows_s, others_s = map(float, sum(recent, np.zeros(3)))
            if watched_s > 0:
                is_known = self._totals[node_id].others_s >= 0
                others = others_s / watched_s if is_known else math.nan
                found[node_id] = Shares(rows_s / watched_s, others, lags.get(node_id, 0.0))
        return found

    def lags(self, node_ids: Collection[int]) -> dict[int, float]:
        """Return the nodes that the others wait for, and how much longer those have waited.

        It is empty until all nodes have been watched for a minute.
        """
        if len(node_ids) < 2:
            return {}
        # Without the newest slice, which is still growing.
        minute = range(self._newest - SLICES, self._newest)
        by_slice = [self._lags_in(number, node_ids) for number in minute]
        if not all(by_slice):
            return {}
        # The median, so that a node counts as awaited only if it is in most of the slices.
        lags = {node: statistics.median_low([part[node] for part in by_slice]) for node in node_ids}
        return {node: lag for node, lag in lags.items() if lag >= AWAITED}

    def _lags_in(self, number: int, node_ids: Collection[int]) -> Mapping[int, float]:
        """Return how much longer the others waited in a slice; empty if that is not known."""
        waited = {}
        for node_id in node_ids:
            part = self._slices.get(node_id, {}).get(number)
            if part is None or part[0] < SLICE_S / 2 or self._totals[node_id].others_s < 0:
                return {}
            waited[node_id] = float(part[2] / part[0])
        # Of two nodes the one that waits shows how long. Their median would be half of it.
        typical = max(waited.values()) if len(waited) == 2 else statistics.median(waited.values())
        return {node_id: typical - share for node_id, share in waited.items()}


def _seconds(active: NodeActive) -> np.ndarray[Any, Any]:
    return np.array([getattr(active, name) for name in _WAITED])


@dataclass
class View:
    """The controller's knowledge of the cluster; read it while holding its condition."""

    state: states.State
    feeds: dict[tuple[int, str], FeedCount] = field(default_factory=dict)
    spooled: deque[tuple[int, Spooled]] = field(default_factory=deque)
    """New reports of rows in agents' spools, by node id, that the feeds have not handled yet."""
    progress: int = 0
    """Counts feed messages with news, so that a wait can distinguish progress from silence."""
    tensorboard: BoardStarted | None = None
    joined: set[tuple[int, int]] = field(default_factory=set)
    """Node and process id of each agent that has ever joined."""
    pids: dict[int, int] = field(default_factory=dict)
    """Process ids of the children, by node id."""
    activity: dict[int, NodeActive] = field(default_factory=dict)
    """The nodes' activity outside of feeds, by node id."""
    load: dict[int, NodeLoad] = field(default_factory=dict)
    """The nodes' use of CPU, memory and GPU, by node id; empty without an observer of it."""
    waits: Waits = field(default_factory=Waits)
    """The nodes' waits in the last minute."""
    have_feeds_ended: bool = False
    """Whether the end of all feeds has been announced to the nodes."""


def launched(spec: ClusterSpec, begun_s: float) -> Launched:
    names = tuple(node.name for node in spec.nodes)
    return Launched(spec.cluster_id, begun_s, spec.framework, names)


@dataclass
class Seen:
    """The states of a cluster that have been published."""

    cluster: str
    state: str = ""
    generation: int = -1
    failures: tuple[Failure, ...] = ()
    checkpoint: CheckpointRef | None = None
    is_over: bool = False

    def news(self, state: states.State, now_s: float) -> Iterator[Changed | Checkpoint]:
        """Yield the changes in a state: all of it, if it is the first."""
        name, before = type(state).__name__.lower(), states.before_stop(state)
        generation = states.generation_of(state)
        # There is none after the end, for which the last one stays.
        generation = self.generation if generation is None else generation
        failures = tuple(getattr(before, "failures", ()))
        is_over = states.is_empty(state)
        now = (name, generation, failures, is_over)
        if now != (self.state, self.generation, self.failures, self.is_over):
            is_another = (self.state, self.generation) != (name, generation)
            # Places do not change within a generation, so they are sent once.
            begins = not self.state or (name == "running" and is_another)
            world = getattr(before, "world", None)
            cause = getattr(getattr(before, "roster", None), "history", None)
            problem = getattr(before, "problem", None)
            problems = tuple(map(_problem, sorted(failures, key=lambda failure: failure.order)))
            if problem is not None and not problems:
                problems = (Problem("", f"{type(problem).__name__}: {problem}"),)
            yield Changed(
                self.cluster,
                now_s,
                name,
                generation,
                _places(world) if begins else (),
                problems,
                cause.cause.headline() if begins and cause and cause.cause else "",
                states.status_of(state),
                is_over,
            )
            self.state, self.generation, self.failures, self.is_over = now
        checkpoint = getattr(getattr(before, "roster", None), "checkpoint", None)
        if checkpoint is not None and checkpoint != self.checkpoint:
            self.checkpoint = checkpoint
            yield Checkpoint(self.cluster, now_s, checkpoint.url, checkpoint.step)


def _problem(failure: Failure) -> Problem:
    return Problem(failure.node, failure.headline(), failure.describe())


def _places(world: World | None) -> tuple[Place, ...]:
    members = world.members if world else ()
    return tuple(Place(member.node.node_id, member.rank, member.host) for member in members)


def sampled(spec: ClusterSpec, now_s: float, view: View) -> Sampled:
    """Return a sample of the nodes' progress; the caller holds the view."""
    node_ids = range(len(spec.nodes))
    generation = states.generation_of(view.state)
    reported = [view.activity.get(node_id) or _NOTHING for node_id in node_ids]
    # A report from before a restart does not describe the node's progress now.
    active = [each if generation in (None, each.generation) else _NOTHING for each in reported]
    names = sorted({name for each in active for name in each.metrics})
    feeds = sorted({feed for _, feed in view.feeds})
    return Sampled(
        spec.cluster_id,
        now_s,
        [node_state(view, node_id) for node_id in node_ids],
        [view.pids.get(node_id, 0) for node_id in node_ids],
        [each.step for each in active],
        {name: [each.numbers.get(name) for each in active] for name in names},
        {feed: _columns([view.feeds.get((n, feed)) for n in node_ids]) for feed in feeds},
        _loads([view.load.get(node_id) or _IDLE for node_id in node_ids]) if view.load else {},
        _waits(view, node_ids),
    )


_NOTHING, _IDLE = NodeActive(0), NodeLoad(0.0, 0)
_UNKNOWN = Shares(math.nan, math.nan, math.nan)


def _loads(loads: list[NodeLoad]) -> dict[str, list[float]]:
    columns = {name: [getattr(load, name) for load in loads] for name in NodeLoad.__struct_fields__}
    # Columns without any value would only lengthen each sample.
    always = ("cores", "memory_nbytes")
    return {name: column for name, column in columns.items() if name in always or any(column)}


def _waits(view: View, node_ids: Iterable[int]) -> dict[str, list[float | None]]:
    shares = view.waits.shares(in_step(view.state))
    found = [shares.get(node_id, _UNKNOWN) for node_id in node_ids] if shares else []
    columns = {name: [getattr(each, name) for each in found] for name in ("rows", "others", "lag")}
    return {
        name: [None if math.isnan(share) else share for share in column]
        for name, column in columns.items()
        if column
    }


def _columns(counts: list[FeedCount | None]) -> FeedColumns:
    found = [count or FeedCount("") for count in counts]
    return FeedColumns(
        [count.rows_received for count in found],
        [count.given.used for count in found],
        [count.given.steps for count in found],
        [count.given.epochs for count in found],
    )


def node_state(view: View, node_id: int) -> str:
    """Return a node's state, in a word or two.

    It is `starting` while it has no agent, `gathering` until all nodes have one, and `preparing`
    while its child imports and connects to the others.
    """
    state = states.before_stop(view.state)
    if any(failure.node_id == node_id for failure in getattr(state, "failures", ())):
        return "failed"
    if node_id in getattr(state, "left", ()):
        return "failed"
    if node_id in getattr(state, "returned", {}):
        return "returned"
    # Otherwise the state is that before a stop, which has been asked for since.
    if isinstance(state, states.Running) and state is view.state:
        return "in map_fun" if node_id in state.in_map_fun else "preparing"
    if isinstance(view.state, states.Gathering):
        return "gathering" if node_id in view.state.roster.agents else "starting"
    has_ended = isinstance(view.state, (states.Finished, states.Failed, states.Stopped))
    return "stopped" if has_ended else "stopping"


def in_step(state: states.State) -> list[int]:
    """Return the nodes that train together now: in `map_fun`, with a job-finishing role."""
    if not isinstance(state, states.Running):
        return []
    return [
        member.node.node_id
        for member in state.world.members
        if member.role.finishes_job
        and member.node.node_id in state.in_map_fun
        and member.node.node_id not in state.returned
    ]
