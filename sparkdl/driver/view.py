"""The controller's view of its cluster, and the events that describe its changes. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from sparkdl.control.messages import BoardStarted, NodeActive, NodeLoad, Spooled
from sparkdl.control.rows import FeedCount
from sparkdl.core.failure import Failure
from sparkdl.core.spec import ClusterSpec
from sparkdl.core.world import CheckpointRef, World
from sparkdl.driver.events import Changed, Checkpoint, FeedColumns, Location, Problem, Sampled
from sparkdl.driver.lifecycle import state as states

WAITS = ("watched", "rows", "others")


@dataclass
class ClusterView:
    """The controller's knowledge of the cluster; read it while holding its condition."""

    state: states.State
    feeds: dict[tuple[int, str], FeedCount] = field(default_factory=dict)
    spooled: deque[tuple[int, Spooled]] = field(default_factory=deque)
    """New reports of rows in agents' spools, by node id, that the feeds have not handled yet."""
    progress: int = 0
    """Counts feed messages that change something: a wait distinguishes progress from silence."""
    tensorboard: BoardStarted | None = None
    joined: set[tuple[int, int]] = field(default_factory=set)
    """Node and process id of each agent that has ever joined."""
    pids: dict[int, int] = field(default_factory=dict)
    """Process ids of the children, by node id."""
    activity: dict[int, NodeActive] = field(default_factory=dict)
    """The nodes' activity outside of feeds, by node id."""
    load: dict[int, NodeLoad] = field(default_factory=dict)
    """The nodes' use of CPU, memory and GPU, by node id; empty without an observer of it."""
    have_feeds_ended: bool = False
    """Whether the end of all feeds has been announced to the nodes."""


@dataclass
class PublishedState:
    """The states of a cluster that have been published."""

    cluster: str
    state: str = ""
    generation: int = -1
    failures: tuple[Failure, ...] = ()
    checkpoint: CheckpointRef | None = None
    is_over: bool = False
    reason: str = ""

    def changes(self, state: states.State, now_s: float) -> Iterator[Changed | Checkpoint]:
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
            problem = getattr(before, "problem", None)
            ordered = sorted(failures, key=lambda failure: failure.order)
            problems = tuple(Problem(f.node, f.headline(), f.describe()) for f in ordered)
            if problem is not None and not problems:
                problems = (Problem("", f"{type(problem).__name__}: {problem}"),)
            yield Changed(
                self.cluster,
                now_s,
                name,
                generation,
                _locations(getattr(before, "world", None)) if begins else (),
                problems,
                self.reason if begins else "",
                states.status_of(state),
                is_over,
            )
            self.state, self.generation, self.failures, self.is_over = now
            self.reason = getattr(state, "reason", self.reason)
        checkpoint = getattr(getattr(before, "registry", None), "checkpoint", None)
        if checkpoint is not None and checkpoint != self.checkpoint:
            self.checkpoint = checkpoint
            yield Checkpoint(self.cluster, now_s, checkpoint.url, checkpoint.step)


def _locations(world: World | None) -> tuple[Location, ...]:
    members = world.members if world else ()
    return tuple(Location(member.node.node_id, member.rank, member.host) for member in members)


def sampled(spec: ClusterSpec, now_s: float, view: ClusterView) -> Sampled:
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
        _waits(active),
    )


_NOTHING, _IDLE = NodeActive(0), NodeLoad(0.0, 0)


def _loads(loads: list[NodeLoad]) -> dict[str, list[float]]:
    columns = {name: [getattr(load, name) for load in loads] for name in NodeLoad.__struct_fields__}
    # Columns without any value would only lengthen each sample.
    always = ("cores", "memory_nbytes")
    return {name: column for name, column in columns.items() if name in always or any(column)}


def _waits(active: list[NodeActive]) -> dict[str, list[float]]:
    columns = {name: [getattr(each, f"{name}_s") for each in active] for name in WAITS}
    return columns if any(columns["watched"]) else {}


def _columns(counts: list[FeedCount | None]) -> FeedColumns:
    found = [count or FeedCount("") for count in counts]
    return FeedColumns(
        [count.rows_received for count in found],
        [count.given.used for count in found],
        [count.given.steps for count in found],
        [count.given.epochs for count in found],
    )


def node_state(view: ClusterView, node_id: int) -> str:
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
        return "gathering" if node_id in view.state.registry.agents else "starting"
    has_ended = isinstance(view.state, (states.Finished, states.Failed, states.Stopped))
    return "stopped" if has_ended else "stopping"
