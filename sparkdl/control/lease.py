"""How long the two ends of a connection keep up hope while nothing comes: the agent for less long.

Runs in: driver, agent

A cut of the network for less than `lease_s` has to harm nobody. What is sent during a cut of c
seconds arrives by TCP's retransmission, whose pauses double (RFC 6298): at the latest 2 c after the
cut began, and a moment. So neither end may give up before twice the lease. The agent then ends its
child; the driver gives the seat away later than the last moment at which that can be, so that
never two children train for one node.

An agent that is stopped (SIGSTOP) cannot end its child. So it lets the child hear from it all the
time, and a child that hears nothing for as long ends itself.

    0 cut ─ lease_s mended ─ 2 lease_s all has arrived ─ agent ends its child ─ driver gives up
"""

from __future__ import annotations

from dataclasses import dataclass

_MOMENT_S = 1.0
CLOSE_S = 2.0


@dataclass(frozen=True)
class KeepAlive:
    """What a WebSocket needs to notice silence: pings, whose answers are awaited so long.

    Attributes:
        ping_interval: seconds.
        ping_timeout: seconds; then the connection is closed, which takes up to `close_timeout`.
        close_timeout: seconds.
    """

    ping_interval: float
    ping_timeout: float
    close_timeout: float

    @property
    def longest_s(self) -> float:
        """How long after the beginning of silence the connection is over at the latest."""
        return self.ping_interval + self.ping_timeout + self.close_timeout


def agent_keep_alive(lease_s: float) -> KeepAlive:
    """Return when an agent gives up its driver."""
    moment_s = min(_MOMENT_S, lease_s / 4)
    return KeepAlive(lease_s / 4, 2 * lease_s + moment_s, min(CLOSE_S, lease_s / 4))


def driver_keep_alive(lease_s: float) -> KeepAlive:
    """Return when the driver gives up an agent: always after the agent has given up the driver."""
    agent = agent_keep_alive(lease_s)
    return KeepAlive(lease_s / 4, agent.longest_s + lease_s / 4, agent.close_timeout)


def beat_s(lease_s: float) -> float:
    """Return how often an agent lets its child hear that it lives."""
    return lease_s / 4


SILENT_LOOKS = 8
"""So often in a row a child has to find that nothing has come. If both were stopped and go on
again, the child may look before its agent has had its turn; that is one of them."""


def look_s(lease_s: float) -> float:
    """Return how long each of a child's looks lasts."""
    return agent_keep_alive(lease_s).longest_s / SILENT_LOOKS
