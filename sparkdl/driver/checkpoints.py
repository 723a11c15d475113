"""Which nodes have written their parts of which checkpoint, and what the first one is told. Pure.

Runs in: driver
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from sparkdl.control.messages import CheckpointCommit, CheckpointDone, CheckpointPart
from sparkdl.control.rows import FeedCoverage
from sparkdl.core.checkpoint import CheckpointRef
from sparkdl.core.world import World
from sparkdl.driver.feeds.coverage import CoverageStore
from sparkdl.node.checkpoint.manifest import Manifest


class Checkpoints:
    """The checkpoints under way in one world. Nothing of an older world counts.

    Attributes:
        books: what was fed, and what a checkpoint covers.
    """

    def __init__(self, cluster_id: str, books: CoverageStore) -> None:
        self.books = books
        self._cluster_id = cluster_id
        self._generation = 0
        self._parts: dict[int, dict[int, CheckpointPart]] = {}
        self._last: dict[int, int] = {}
        self._committing: dict[int, dict[str, FeedCoverage]] = {}

    def part(
        self, world: World, node_id: int, part: CheckpointPart, time_s: float
    ) -> tuple[int, CheckpointCommit] | None:
        """Take a node's part; return which node is to be told what, if any.

        Args:
            time_s: seconds since the epoch, for the manifest.
        """
        writers = {m.node.node_id: m for m in world.trainers if not m.role.is_server}
        if part.generation != world.generation or node_id not in writers:
            return None
        self._renew(world.generation)
        self._parts.setdefault(part.step, {})[node_id] = part
        self._last[node_id] = part.step
        leader = next(iter(writers))
        step = self._last.get(leader)
        if step is None or step not in self._parts or self._parts[step][leader].problem:
            return None  # it waits for nobody
        names = {node: member.node.name for node, member in writers.items()}
        if problem := self._problem(step, leader, names):
            self._parts = {s: p for s, p in self._parts.items() if s >= step}  # said once
            return leader, CheckpointCommit(self._generation, step, problem=problem)
        parts = self._parts[step]
        missing = tuple(name for node, name in names.items() if node not in parts)
        if missing:
            return leader, CheckpointCommit(self._generation, step, missing=missing)
        feeds = self.books.coverage(self._generation, {node: p.feeds for node, p in parts.items()})
        self._parts = {s: p for s, p in self._parts.items() if s > step}
        self._committing[step] = feeds
        manifest = Manifest(
            step, self._cluster_id, self._generation, time_s, tuple(names.values()), feeds
        )
        text = msgspec.json.encode(manifest).decode()
        return leader, CheckpointCommit(self._generation, step, text)

    def done(self, generation: int, message: CheckpointDone) -> CheckpointRef | None:
        """Return the checkpoint that is complete; tell the feeds what it covers.

        Args:
            generation: of the world that there is now.
        """
        if message.generation != generation or generation != self._generation:
            return None
        feeds = self._committing.pop(message.step, None)
        if feeds is None:
            return None
        self._committing.clear()
        self.books.cover(feeds)
        return CheckpointRef(message.url, message.step, generation)

    def _renew(self, generation: int) -> None:
        if generation != self._generation:
            self._generation = generation
            self._parts, self._last, self._committing = {}, {}, {}

    def _problem(self, step: int, leader: int, names: Mapping[int, str]) -> str:
        """Say why there will be no checkpoint of `step`; empty if there may be one."""
        parts = self._parts[step]
        for node, part in parts.items():
            if part.problem:
                return f"{names[node]} could not write its part: {part.problem}"
        for node, name in names.items():
            if node not in parts and self._last.get(node, -1) > step:
                return (
                    f"{name} has called ctx.checkpoint({self._last[node]}) without "
                    f"ctx.checkpoint({step}); all nodes have to make the same checkpoints"
                )
        for earlier, others in self._parts.items():
            if earlier < step and leader not in others:
                node = next(iter(others))
                return (
                    f"{names[leader]} has called ctx.checkpoint({step}) without "
                    f"ctx.checkpoint({earlier}), which {names[node]} has called; all nodes have to "
                    "make the same checkpoints"
                )
        return ""
