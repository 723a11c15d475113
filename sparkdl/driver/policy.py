"""What to do about failures. Chooses, never acts.

Runs in: driver
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkdl.core.failure import Failure
from sparkdl.core.settings import Settings


@dataclass(frozen=True)
class Fail:
    """End the cluster with these failures."""

    reason: str


@dataclass(frozen=True)
class Retry:
    """Start another round of children on new ports; user code has not trained yet."""

    reason: str


Decision = Fail | Retry


def decide(failures: Sequence[Failure], port_retries: int, settings: Settings) -> Decision:
    """Return what to do about `failures` of one round.

    Args:
        port_retries: rounds that were started before because a port was lost.
    """
    lost_ports = [failure for failure in failures if failure.kind == "port"]
    if not lost_ports:
        return Fail("user code or a node failed")
    if port_retries >= settings.max_port_retries:
        return Fail(f"ports were lost to other processes {port_retries + 1} times in a row")
    return Retry(
        f"{lost_ports[0].node} lost its port to another process; "
        f"retry {port_retries + 1} of {settings.max_port_retries} on new ports"
    )
