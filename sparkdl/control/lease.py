"""Keep-alive timeouts. The agent always gives up before the driver does.

Runs in: driver, agent

The lease detects a frozen process on a live host. A lost host is detected much sooner
(`control/host_watch.py`).

Silence shorter than `lease_s` must do no harm, even where the kernel does not report whether the
host is there. Data sent during a cut of c seconds arrives by TCP's retransmission, whose pauses
double (RFC 6298): at most 2 c after the cut began, and a moment. Neither end may therefore give up
before twice the lease. The agent then ends its child. The driver replaces the node only after the
latest time at which the agent can have ended it, so two children never train for one node.

A stopped agent (SIGSTOP) cannot end its child. The agent therefore sends the child regular beats,
and a child without beats for as long ends itself.

    0 cut ─ lease_s mended ─ 2 lease_s all has arrived ─ agent ends its child ─ driver gives up
"""

from __future__ import annotations

from dataclasses import dataclass

_MOMENT_S = 1.0
CLOSE_S = 2.0
_PINGS_PER_S = 500
"""The most pings that the driver answers, of all agents: each of thousands pings less often."""


@dataclass(frozen=True)
class KeepAlive:
    """The settings by which a WebSocket notices silence: its pings, and the wait for answers.

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
        """The most time between the beginning of silence and the end of the connection."""
        return self.ping_interval + self.ping_timeout + self.close_timeout


def agent_keep_alive(lease_s: float, num_nodes: int = 1) -> KeepAlive:
    """Return when an agent gives up its driver."""
    moment_s = min(_MOMENT_S, lease_s / 4)
    ping_s = max(lease_s / 4, num_nodes / _PINGS_PER_S)
    return KeepAlive(ping_s, 2 * lease_s + moment_s, min(CLOSE_S, lease_s / 4))


def driver_keep_alive(lease_s: float, num_nodes: int = 1) -> KeepAlive:
    """Return when the driver gives up an agent: always after the agent has given up the driver."""
    agent = agent_keep_alive(lease_s, num_nodes)
    return KeepAlive(agent.ping_interval, agent.longest_s + lease_s / 4, agent.close_timeout)


def driver_patience_s(lease_s: float, num_nodes: int = 1) -> float:
    """Return after how much silence of an agent, which pings all the time, it is given up.

    The driver need not ping where its kernel reports when data arrived: pinging thousands of
    agents would be most of its work. The silence may have begun one ping earlier than noticed.
    """
    agent = agent_keep_alive(lease_s, num_nodes)
    return agent.longest_s + agent.ping_interval + lease_s / 4


def beat_s(lease_s: float) -> float:
    """Return how often an agent sends its child a beat."""
    return lease_s / 4


SILENT_LOOKS = 8
"""A child ends itself after so many looks in a row that find nothing. One would not do: if both
were stopped and run again, the child may look before its agent has had its turn."""


def look_s(lease_s: float, num_nodes: int = 1) -> float:
    """Return how long each look of a child lasts."""
    return agent_keep_alive(lease_s, num_nodes).longest_s / SILENT_LOOKS
