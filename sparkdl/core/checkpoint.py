"""What a round of children begins with, after those before it.

Runs in: anywhere
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointRef:
    """A checkpoint that is complete.

    Attributes:
        url: of its folder.
        step: the user's count, see `NodeContext.checkpoint`.
        generation: of the world that made it.
    """

    url: str
    step: int
    generation: int = 0

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Resume:
    """Where a world goes on.

    Attributes:
        restarts: after failures, so far.
        checkpoint: the last one that is complete, or `None`.
    """

    restarts: int = 0
    checkpoint: CheckpointRef | None = None


FIRST_TIME = Resume()
"""Where a cluster begins that has no past."""
