"""Which nodes have given their values to which gathering (`ctx.all_gather`), and what comes of it.

Runs in: driver. Pure.
"""

from __future__ import annotations

from sparkdl.control.messages import MAX_MESSAGE_NBYTES, AllGathered, Gather
from sparkdl.core.world import World

MAX_GATHERED_NBYTES = MAX_MESSAGE_NBYTES // 4 * 3 - 64 * 1024
"""All values together at most: what fits into one message, as base64."""


class Gatherings:
    """The gatherings under way in one world. Nothing of an older world counts."""

    def __init__(self) -> None:
        self._generation = 0
        self._values: dict[int, dict[int, bytes]] = {}
        self._returned: set[int] = set()

    def give(self, world: World, node_id: int, given: Gather) -> list[AllGathered]:
        """Take a node's value; return what the nodes that train are to be told, if anything."""
        if given.generation != world.generation or node_id not in _members(world):
            return []
        self._renew(world)
        self._values.setdefault(given.number, {})[node_id] = given.value
        return self._ended(world, given.number)

    def leave(self, world: World, node_id: int, generation: int) -> list[AllGathered]:
        """Take that a node has returned from `map_fun`; return what the others are to be told."""
        if generation != world.generation:
            return []
        self._renew(world)
        self._returned.add(node_id)
        return [answer for number in list(self._values) for answer in self._ended(world, number)]

    def _ended(self, world: World, number: int) -> list[AllGathered]:
        """Return the end of a gathering in a list; an empty one if it goes on."""
        values, members = self._values[number], _members(world)
        missing = [node for node in members if node not in values]
        problem = ""
        if gone := [members[node] for node in missing if node in self._returned]:
            problem = f"{', '.join(gone)} returned from map_fun without it"
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
        if world.generation != self._generation:
            self._generation, self._values, self._returned = world.generation, {}, set()


def _members(world: World) -> dict[int, str]:
    """Return the names of the nodes that take part, by node id in the order of their ranks."""
    return {m.node.node_id: m.node.name for m in world.trainers if not m.role.is_server}
