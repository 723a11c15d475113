"""When a training stands still, and who is behind. Pure: no clocks, threads or messages.

Runs in: driver

A training stands still when none of its nodes takes a step, reads a row or ends for
`hang_timeout_s`. Steps are the batches of a feed, or of files that a node reads itself, and what
user code tells of with `ctx.report`. Nodes that tell nothing of the kind are judged by whether they
print anything. A node that has read all its rows while more may come is waiting to be fed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sparkdl.driver.health.stragglers import Progress, steps_of


@dataclass(frozen=True)
class Hang:
    """A training that stands still.

    Attributes:
        behind: the nodes with the fewest steps; all, if none has more than another.
        ahead: the others.
        unit: what `steps` counts: `step` as told by user code, or `batch`.
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
        """Return the finding in words."""
        text = f"no step, no row and no exit in any node for {self.still_s:.0f} s"
        if not self.ahead:
            return f"{text}; {self._told(self.behind, 'all nodes')}"
        behind = ", ".join(f"{node} at {self._at(node)}" for node in self.behind)
        ahead = ", ".join(f"{node} at {self._at(node)}" for node in self.ahead)
        return f"{text}; behind: {behind}; ahead: {ahead}"

    def message(self, node: Progress) -> str:
        """Return the message of a failure of `node`."""
        text = f"made no progress for {self.still_s:.0f} s, at {self._at(node)}"
        if not self.ahead:
            return text
        first = max(self.ahead, key=lambda other: self.steps[other.node_id])
        return f"{text}, while {first} is at {self._at(first)}"

    def _told(self, nodes: Sequence[Progress], who: str) -> str:
        steps = self.steps[nodes[0].node_id]
        return f"{who} at {self._at(nodes[0])}" if steps >= 0 else f"{who} before their first step"

    def _at(self, node: Progress) -> str:
        steps = self.steps[node.node_id]
        return f"{self.unit} {steps}" if steps >= 0 else f"no {self.unit} yet"


@dataclass(frozen=True)
class Watch:
    """What has been seen so far.

    Attributes:
        since_s: when anything has changed last.
        looked_s: when it was looked last.
        is_told: this standstill has been told of.
    """

    generation: int = -1
    signs: Mapping[int, object] = field(default_factory=dict)
    since_s: float = 0.0
    looked_s: float = 0.0
    is_told: bool = False


def look(
    watch: Watch,
    generation: int,
    nodes: Sequence[Progress],
    now_s: float,
    timeout_s: float,
    start_s: float = 0.0,
) -> tuple[Watch, Hang | None]:
    """Return what is known now, and a hang if there is one that has not been told of.

    Args:
        nodes: those whose `map_fun` finishes the job and has not returned.
        start_s: how long nodes may take to enter `map_fun`, if that is longer than `timeout_s`.
    """
    asleep_s = now_s - watch.looked_s
    if asleep_s > timeout_s / 2:  # the driver itself stood still: it has not heard what came
        watch = replace(watch, since_s=watch.since_s + asleep_s)
    judged = [node for node in nodes if node.tells] or list(nodes)
    signs = {node.node_id: _sign(node) for node in judged}
    is_waiting = all(node.is_idle for node in judged)
    if is_waiting or generation != watch.generation or signs != watch.signs:
        return Watch(generation, signs, now_s, now_s), None
    watch = replace(watch, looked_s=now_s)
    still_s = now_s - watch.since_s
    are_in = all(node.has_entered for node in nodes)
    if watch.is_told or still_s < (timeout_s if are_in else max(timeout_s, start_s)):
        return watch, None
    return replace(watch, is_told=True), _hang(generation, nodes, still_s)


def _sign(node: Progress) -> object:
    if node.tells:
        return node.told, node.batches, node.rows
    return node.has_entered, node.log_nbytes


def _hang(generation: int, nodes: Sequence[Progress], still_s: float) -> Hang:
    unit, steps = steps_of(nodes)
    fewest = min(steps.values())
    behind = tuple(node for node in nodes if steps[node.node_id] == fewest)
    ahead = tuple(node for node in nodes if steps[node.node_id] > fewest)
    return Hang(generation, behind, ahead, unit, steps, still_s)
