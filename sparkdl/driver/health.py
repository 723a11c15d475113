"""Watches whether the training moves.

A training hangs when none of its nodes takes a step, reads a row or ends for `hang_timeout_s`.
Steps are the batches of a feed, the batches of files that a node reads itself, and the steps of
`ctx.report`. Nodes without any of these are judged by whether they print. A node that has read all
its rows while more may come is waiting to be fed.

`look` is pure and judges; `HangWatch` calls it periodically, and acts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sparkdl.control.messages import NodeActive
from sparkdl.control.rows import FeedCount
from sparkdl.core.deadline import Deadline
from sparkdl.core.failure import Failure
from sparkdl.core.texts import MOST, listed
from sparkdl.driver.controller import Controller
from sparkdl.driver.feeds.report import stalled_waits
from sparkdl.driver.lifecycle.state import NodesBlamed, Running, node_failure
from sparkdl.driver.view import ClusterView

_log = logging.getLogger(__name__)
MAX_PERIOD_S = 5.0
STACKS_S = 5.0
"""How long the agents have to bring the stacks of their children."""


@dataclass(frozen=True)
class Progress:
    """How far one node is, as far as it has reported.

    Attributes:
        step: the last step of `ctx.report`, -1 for none.
        batches: taken from feeds, and from files that the node reads itself.
        rows: read from feeds.
        log_nbytes: printed.
        has_entered: it is in `map_fun`.
        is_idle: it has read all rows that are there, and others may come.
    """

    node_id: int
    node: str
    rank: int
    step: int = -1
    batches: int = 0
    rows: int = 0
    log_nbytes: int = 0
    has_entered: bool = True
    is_idle: bool = False

    @property
    def has_reported(self) -> bool:
        return self.step >= 0 or self.batches > 0 or self.rows > 0

    def __str__(self) -> str:
        return f"{self.node} (rank {self.rank})"


def progress_of(
    state: Running,
    feeds: Mapping[tuple[int, str], FeedCount],
    activity: Mapping[int, NodeActive],
    have_feeds_ended: bool,
) -> list[Progress]:
    """Return the progress of the nodes that finish the job and have not returned."""
    may_be_fed = state.registry.spec.is_fed and not have_feeds_ended
    found = []
    by_node: dict[int, list[FeedCount]] = {}
    for (node_id, _), count in feeds.items():
        by_node.setdefault(node_id, []).append(count)
    for member in state.world.members:
        node_id = member.node.node_id
        if not member.role.finishes_job or node_id in state.returned:
            continue
        counts = by_node.get(node_id, [])
        active = activity.get(node_id)
        # The report may be that of the child before.
        if active is None or active.generation != state.world.generation:
            active = NodeActive(state.world.generation)
        found.append(
            Progress(
                node_id,
                member.node.name,
                member.rank,
                active.step,
                sum(count.given.steps for count in counts) + active.batches,
                sum(count.given.rows for count in counts),
                active.log_nbytes,
                node_id in state.in_map_fun,
                may_be_fed and member.role.can_be_fed and all(map(_has_read_all, counts)),
            )
        )
    return found


def _has_read_all(count: FeedCount) -> bool:
    """Whether a node waits for rows of a feed, or wants none."""
    if count.closed or count.closed_to >= count.epoch:
        return True
    has_read = count.given.used >= count.rows_received
    # Epochs that the node repeats from its log must be read too. Rows that wait for the next
    # epoch's, as in a stream, cannot be read yet.
    return count.given.epochs > count.cut.epoch and (has_read or not count.epoch_rows)


def steps_of(nodes: Sequence[Progress]) -> tuple[str, dict[int, int]]:
    """Return the unit of comparison, `step` or `batch`, and the count by node id."""
    if any(node.step >= 0 for node in nodes):
        return "step", {node.node_id: node.step for node in nodes}
    return "batch", {node.node_id: node.batches if node.has_reported else -1 for node in nodes}


@dataclass(frozen=True)
class Hang:
    """A training that hangs.

    Attributes:
        behind: the nodes with the fewest steps; all, if none has more than another.
        ahead: the others.
        unit: what `steps` counts: `step` as reported by user code, or `batch`.
        steps: by node id.
        still_s: for how long.
    """

    generation: int
    behind: tuple[Progress, ...]
    ahead: tuple[Progress, ...]
    unit: str
    steps: Mapping[int, int]
    still_s: float

    def describe(self) -> str:
        text = f"no step, no row and no exit in any node for {self.still_s:.0f} s"
        nodes = [f"{node} at {self._at(node)}" for node in (*self.behind, *self.ahead)]
        return f"{text}: {listed(nodes)}"

    def message(self, node: Progress) -> str:
        text = f"made no progress for {self.still_s:.0f} s, at {self._at(node)}"
        if not self.ahead:
            return text
        first = max(self.ahead, key=lambda other: self.steps[other.node_id])
        return f"{text}, while {first} is at {self._at(first)}"

    def _at(self, node: Progress) -> str:
        steps = self.steps[node.node_id]
        return f"{self.unit} {steps}" if steps >= 0 else f"no {self.unit} yet"


@dataclass(frozen=True)
class Watch:
    """The last observation of the training."""

    generation: int = -1
    keys: Mapping[int, object] = field(default_factory=dict)
    since_s: float = 0.0
    looked_s: float = 0.0
    is_reported: bool = False


def look(
    watch: Watch,
    generation: int,
    nodes: Sequence[Progress],
    now_s: float,
    timeout_s: float,
    start_s: float = 0.0,
) -> tuple[Watch, Hang | None]:
    """Return the new observation, and a hang that has not been reported yet, if there is one.

    Args:
        nodes: those whose `map_fun` finishes the job and has not returned.
        start_s: how long nodes may take to enter `map_fun`, if that is longer than `timeout_s`.
    """
    asleep_s = now_s - watch.looked_s
    if asleep_s > timeout_s / 2:  # the driver itself stood still and has not processed messages
        watch = replace(watch, since_s=watch.since_s + asleep_s)
    judged = [node for node in nodes if node.has_reported] or list(nodes)
    keys = {node.node_id: _progress_key(node) for node in judged}
    is_waiting = all(node.is_idle for node in judged)
    # Nodes without rows wait for the feed, and the feed has a timeout of its own.
    if is_waiting or generation != watch.generation or keys != watch.keys:
        return Watch(generation, keys, now_s, now_s), None
    watch = replace(watch, looked_s=now_s)
    still_s = now_s - watch.since_s
    are_in = all(node.has_entered for node in nodes)
    if watch.is_reported or still_s < (timeout_s if are_in else max(timeout_s, start_s)):
        return watch, None
    return replace(watch, is_reported=True), _hang(generation, nodes, still_s)


def _progress_key(node: Progress) -> object:
    if node.has_reported:
        return node.step, node.batches, node.rows
    return node.has_entered, node.log_nbytes


def _hang(generation: int, nodes: Sequence[Progress], still_s: float) -> Hang:
    unit, steps = steps_of(nodes)
    fewest = min(steps.values())
    behind = tuple(node for node in nodes if steps[node.node_id] == fewest)
    ahead = tuple(node for node in nodes if steps[node.node_id] > fewest)
    return Hang(generation, behind, ahead, unit, steps, still_s)


class HangWatch:
    """Watches one cluster on its controller's loop, until that is closed."""

    def __init__(self, controller: Controller, timeout_s: float) -> None:
        self._controller = controller
        self._timeout_s = timeout_s
        self._period_s = min(MAX_PERIOD_S, timeout_s / 8)
        self._watch = Watch()

    def start(self) -> None:
        self._controller.soon(self._turn)

    def _turn(self) -> None:
        self._watch, hang = self._look(self._controller.view)
        if hang:  # in a thread: it waits for answers, which come on this loop
            threading.Thread(
                target=self._report, args=(hang,), name="sparkdl-hang", daemon=True
            ).start()
        self._controller.later(self._period_s, self._turn)

    def _look(self, view: ClusterView) -> tuple[Watch, Hang | None]:
        if not isinstance(view.state, Running):
            return Watch(), None
        nodes = progress_of(view.state, view.feeds, view.activity, view.have_feeds_ended)
        generation, now_s = view.state.world.generation, time.monotonic()
        start_s = self._controller.spec.settings.start_timeout_s
        return look(self._watch, generation, nodes, now_s, self._timeout_s, start_s)

    def _report(self, hang: Hang) -> None:
        settings = self._controller.spec.settings
        found_s = self._controller.events.now_s()
        # Asked for before anything is decided: the stacks of a blamed node end with its child.
        stacks = self._controller.fetch_stacks(Deadline.after(STACKS_S))
        spec = self._controller.spec
        stall = self._controller.look(lambda view: stalled_waits(spec, view.feeds))
        stall = stall and f"; {stall}"
        _log.warning(
            "Cluster %s: %s%s (Recovery(hang_timeout_s=%g, on_hang=%r))\n%s",
            self._controller.spec.cluster_id,
            hang.describe(),
            stall,
            self._timeout_s,
            settings.recovery.on_hang,
            _described(stacks, hang),
        )
        # The stacks have taken a while: the training may have moved meanwhile.
        has_moved = not self._controller.look(lambda view: self._look(view)[0].is_reported)
        if settings.recovery.on_hang == "report" or has_moved:
            return
        failures = self._controller.look(lambda view: _failures(view, hang, stall, found_s, stacks))
        self._controller.submit(NodesBlamed(hang.generation, failures))


def _described(stacks: Mapping[str, str], hang: Hang) -> str:
    shown = list(stacks)
    if len(shown) > MOST:
        shown = [node.node for node in (*hang.behind[: MOST - 1], *hang.ahead[:1])]
    texts = [f"Stacks of {node}:\n{stacks[node].rstrip()}" for node in shown]
    if rest := len(stacks) - len(shown):
        texts.append(f"cluster.stacks() has those of {rest} more")
    return "\n".join(texts)


def _failures(
    view: ClusterView, hang: Hang, stall: str, found_s: float, stacks: Mapping[str, str]
) -> tuple[Failure, ...]:
    state = view.state
    if not isinstance(state, Running) or state.world.generation != hang.generation:
        return ()
    failures = (
        node_failure(state, node.node_id, "hang", hang.message(node) + stall, found_s)
        for node in hang.behind
    )
    return tuple(
        replace(each, pid=view.pids.get(each.node_id, 0), traceback=stacks.get(each.node, ""))
        for each in failures
    )
