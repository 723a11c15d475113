"""How far each node is, and who does not keep up with the others. Pure.

Runs in: driver
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sparkdl.control.messages import FeedCount, NodeActive
from sparkdl.core.spec import InputMode
from sparkdl.driver.lifecycle.state import Running

PERIOD_S = 60.0
"""Nodes are compared over so long."""
SILENCE_S = 600.0
"""The same stragglers are named this often at most."""
_MIN_STEPS = 10
"""Of the fastest node in a period, before others are compared with it."""


@dataclass(frozen=True)
class Progress:
    """How far one node is, as far as anybody has told.

    Attributes:
        told: the last step of `ctx.report`, -1 for none.
        batches: taken from feeds, and from files that the node reads itself.
        rows: read from feeds.
        log_nbytes: printed.
        has_entered: it is in `map_fun`.
        is_idle: it has read all rows that are there, and others may come.
    """

    node_id: int
    node: str
    rank: int
    told: int = -1
    batches: int = 0
    rows: int = 0
    log_nbytes: int = 0
    has_entered: bool = True
    is_idle: bool = False

    @property
    def tells(self) -> bool:
        """Whether the node has told of steps or read rows."""
        return self.told >= 0 or self.batches > 0 or self.rows > 0

    def __str__(self) -> str:
        return f"{self.node} (rank {self.rank})"


def progress_of(
    state: Running,
    feeds: Mapping[tuple[int, str], FeedCount],
    activity: Mapping[int, NodeActive],
    have_feeds_ended: bool,
) -> list[Progress]:
    """Return the progress of the nodes that finish the job and have not returned.

    Args:
        feeds: by node id and feed, what nodes have said of their feeds.
        activity: by node id, what they have said beside that.
    """
    may_be_fed = state.roster.spec.input_mode is InputMode.SPARK and not have_feeds_ended
    found = []
    servers = {m.node.node_id for m in state.world.members if m.role.is_server}
    for member in state.world.members:
        node_id = member.node.node_id
        if not member.role.finishes_job or node_id in state.returned:
            continue
        its_own = {node_id, *(servers if member.role.is_chief else ())}  # a chief's steps are there
        counts = [count for (node, _), count in feeds.items() if node in its_own]
        can_be_fed = member.role.can_be_fed or (member.role.is_chief and bool(servers))
        active = activity.get(node_id)
        if active is None or active.generation != state.world.generation:
            active = NodeActive(state.world.generation)
        found.append(
            Progress(
                node_id,
                member.node.name,
                member.rank,
                active.step,
                sum(count.steps for count in counts) + active.batches,
                sum(count.rows_consumed for count in counts),
                active.log_nbytes,
                node_id in state.in_map_fun,
                may_be_fed and can_be_fed and all(map(_has_read_all, counts)),
            )
        )
    return found


def _has_read_all(count: FeedCount) -> bool:
    """Whether a node waits for rows of a feed, or wants none.

    Epochs from its log are to be read as well, and rows that wait for those of the next epoch, as
    in a stream, cannot be.
    """
    if count.closed or count.closed_to >= count.epoch:
        return True
    has_read = count.rows_consumed + count.rows_dropped >= count.rows_received
    return count.epochs_done > count.cut and (has_read or not count.epoch_rows)


def steps_of(nodes: Sequence[Progress]) -> tuple[str, dict[int, int]]:
    """Return what can be compared, `step` or `batch`, and how many of them by node id."""
    if any(node.told >= 0 for node in nodes):
        return "step", {node.node_id: node.told for node in nodes}
    return "batch", {node.node_id: node.batches if node.tells else -1 for node in nodes}


@dataclass(frozen=True)
class Stragglers:
    """How the nodes have kept up with each other.

    Attributes:
        steps: by node id, at the beginning of the period.
        looks: at the nodes, within the period.
        awaited: by node id, at how many of them the others had no rows and this one had.
        named: the stragglers that were named last, at `named_s`.
    """

    generation: int = -1
    unit: str = ""
    steps: Mapping[int, int] = field(default_factory=dict)
    since_s: float = 0.0
    looks: int = 0
    awaited: Mapping[int, int] = field(default_factory=dict)
    named: frozenset[int] = frozenset()
    named_s: float = 0.0


def compare(
    pace: Stragglers, generation: int, nodes: Sequence[Progress], now_s: float
) -> tuple[Stragglers, str]:
    """Return what is known now and, at a period's end, which nodes do not keep up, or nothing.

    A straggler took less than half the steps of the fastest node in the period; or it had unread
    rows for most of it while no other had any, so that the feed waited for it.
    """
    unit, steps = steps_of(nodes)
    if generation != pace.generation or unit != pace.unit or steps.keys() != pace.steps.keys():
        return Stragglers(generation, unit, steps, now_s), ""
    busy = [node.node_id for node in nodes if not node.is_idle]
    awaited = dict(pace.awaited)
    if len(busy) == 1 < len(nodes):
        awaited[busy[0]] = awaited.get(busy[0], 0) + 1
    pace = replace(pace, looks=pace.looks + 1, awaited=awaited)
    if now_s - pace.since_s < PERIOD_S:
        return pace, ""
    slow = _stragglers(pace, nodes, steps)
    is_known = slow.keys() == pace.named and now_s - pace.named_s < SILENCE_S
    if not slow or is_known:
        return Stragglers(
            generation, unit, steps, now_s, named=pace.named, named_s=pace.named_s
        ), ""
    text = f"slower than the others for {now_s - pace.since_s:.0f} s: {'; '.join(slow.values())}"
    return Stragglers(generation, unit, steps, now_s, named=frozenset(slow), named_s=now_s), text


def _stragglers(
    pace: Stragglers, nodes: Sequence[Progress], steps: Mapping[int, int]
) -> dict[int, str]:
    taken = {node_id: steps[node_id] - pace.steps[node_id] for node_id in steps}
    most = max(taken.values(), default=0)
    slow = {}
    for node in nodes:
        if most >= _MIN_STEPS and taken[node.node_id] * 2 < most:
            slow[node.node_id] = f"{node} took {taken[node.node_id]} steps, the fastest {most}"
        elif pace.awaited.get(node.node_id, 0) * 2 > pace.looks:
            slow[node.node_id] = f"{node} has rows to read while the others wait for some"
    return slow
