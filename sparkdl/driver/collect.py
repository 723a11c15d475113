"""Collections that are complete once all nodes have sent their part.

Parts of checkpoints, and values of `ctx.all_gather`. All pure.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from sparkdl.control.messages import (
    MAX_MESSAGE_NBYTES,
    AllGathered,
    CheckpointCommit,
    CheckpointDone,
    CheckpointPart,
    Gather,
)
from sparkdl.control.rows import FeedCoverage
from sparkdl.core.texts import listed
from sparkdl.core.world import CheckpointRef, World
from sparkdl.driver.feeds.coverage import CoverageStore
from sparkdl.node.checkpoint_store import Manifest

MAX_GATHERED_NBYTES = MAX_MESSAGE_NBYTES // 4 * 3 - 64 * 1024
"""Limit for all values together: the size that fits into one message, as base64."""


class Checkpoints:
    """The checkpoints under way in one world. Nothing of an older world counts."""

    def __init__(self, cluster_id: str, coverage: CoverageStore) -> None:
        self.coverage = coverage
        self._cluster_id = cluster_id
        self._generation = 0
        self._parts: dict[int, dict[int, CheckpointPart]] = {}
        self._last: dict[int, int] = {}
        self._committing: dict[int, dict[str, FeedCoverage]] = {}

    def part(
        self, world: World, node_id: int, part: CheckpointPart, time_s: float
    ) -> tuple[int, CheckpointCommit] | None:
        """Add a node's part; return the leader and an answer to it, or `None` if it does not wait.

        Args:
            time_s: seconds since the epoch, for the manifest.
        """
        names = _members(world)
        if part.generation != world.generation or node_id not in names:
            return None
        self._renew(world.generation)
        self._parts.setdefault(part.step, {})[node_id] = part
        self._last[node_id] = part.step
        # Trainers are in the order of ranks, so this node completes the checkpoint.
        leader = next(iter(names))
        step = self._last.get(leader)
        if step is None or step not in self._parts or self._parts[step][leader].problem:
            return None  # the leader is not waiting
        if problem := self._problem(step, leader, names):
            self._parts = {s: p for s, p in self._parts.items() if s >= step}  # said once
            return leader, CheckpointCommit(self._generation, step, problem=problem)
        parts = self._parts[step]
        # Sent at each part, so that the leader's own timeout error can name the missing nodes.
        missing = tuple(name for node, name in names.items() if node not in parts)
        if missing:
            return leader, CheckpointCommit(self._generation, step, missing=missing)
        used = {node: part.feeds for node, part in parts.items()}
        feeds = self.coverage.coverage(self._generation, used)
        self._parts = {s: p for s, p in self._parts.items() if s > step}
        # Covered only once the leader has made the checkpoint complete: it may fail to.
        self._committing[step] = feeds
        manifest = Manifest(
            step, self._cluster_id, self._generation, time_s, tuple(names.values()), feeds
        )
        text = msgspec.json.encode(manifest).decode()
        return leader, CheckpointCommit(self._generation, step, text)

    def done(self, generation: int, message: CheckpointDone) -> CheckpointRef | None:
        """Return the completed checkpoint; note the rows that it covers."""
        if message.generation != generation or generation != self._generation:
            return None
        feeds = self._committing.pop(message.step, None)
        if feeds is None:
            return None
        self._committing.clear()
        self.coverage.mark_covered(feeds)
        return CheckpointRef(message.url, message.step, generation)

    def _renew(self, generation: int) -> None:
        if generation != self._generation:
            self._generation = generation
            self._parts, self._last, self._committing = {}, {}, {}

    def _problem(self, step: int, leader: int, names: Mapping[int, str]) -> str:
        """Return why there will be no checkpoint of `step`; empty if there may be one."""
        parts = self._parts[step]
        for node, part in parts.items():
            if part.problem:
                return f"{names[node]} could not write its part: {part.problem}"
        for node, name in names.items():
            if node not in parts and self._last.get(node, -1) > step:
                return (
                    f"{name} has called ctx.checkpoint({self._last[node]}) without "
                    f"ctx.checkpoint({step}); all nodes must make the same checkpoints"
                )
        for earlier, others in self._parts.items():
            # Steps grow, so the leader can never call an earlier one.
            if earlier < step and leader not in others:
                node = next(iter(others))
                return (
                    f"{names[leader]} has called ctx.checkpoint({step}) without "
                    f"ctx.checkpoint({earlier}), which {names[node]} has called; all nodes must "
                    "make the same checkpoints"
                )
        return ""


class Gatherings:
    """The gatherings under way in one world. Nothing of an older world counts."""

    def __init__(self) -> None:
        self._generation = 0
        self._values: dict[int, dict[int, bytes]] = {}
        self._returned: set[int] = set()
        self._members: dict[int, str] = {}
        """The world's, see `_members`; once, since looking at all nodes for each value is slow."""

    def give(self, world: World, node_id: int, given: Gather) -> list[AllGathered]:
        if given.generation != world.generation:
            return []
        self._renew(world)
        if node_id not in self._members:
            return []
        self._values.setdefault(given.number, {})[node_id] = given.value
        return self._ended(world, given.number)

    def leave(self, world: World, node_id: int, generation: int) -> list[AllGathered]:
        if generation != world.generation:
            return []
        self._renew(world)
        self._returned.add(node_id)
        return [answer for number in list(self._values) for answer in self._ended(world, number)]

    def _ended(self, world: World, number: int) -> list[AllGathered]:
        """Return the end of a gathering in a list; an empty one if it is not over."""
        values, members = self._values[number], self._members
        # Nearly all values end here, so that one of thousands costs no look at all members.
        if len(values) < len(members) and not self._returned:
            return []
        missing = [node for node in members if node not in values]
        problem = ""
        if gone := [members[node] for node in missing if node in self._returned]:
            problem = f"{listed(gone)} returned from map_fun without it"
        elif missing:
            return []
        elif (nbytes := sum(map(len, values.values()))) > MAX_GATHERED_NBYTES:
            problem = (
                f"the values take {nbytes} bytes together, and {MAX_GATHERED_NBYTES} at most can "
                "travel through the driver; use the framework's own collectives for data"
            )
        del self._values[number]
        given = () if problem else tuple(values[node] for node in members)
        return [AllGathered(world.generation, number, given, problem)]

    def _renew(self, world: World) -> None:
        if world.generation != self._generation or not self._members:
            self._generation, self._values, self._returned = world.generation, {}, set()
            self._members = _members(world)


def _members(world: World) -> dict[int, str]:
    return {m.node.node_id: m.node.name for m in world.trainers if not m.role.is_server}
