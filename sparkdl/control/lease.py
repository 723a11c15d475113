"""When the ends of a control connection give each other up. The agent always does so first.

Runs in: driver, agent, child

**A lost host** answers nothing: it has lost its power, its cable or its kernel. With
TCP_USER_TIMEOUT (tcp(7)) the kernel ends the connection, also while the process is busy: at the
agent, which then ends its child, after half of `host_timeout_s`; at the driver, which then gives
the node's place away, after all of it. The kernel counts from the first data without an
acknowledgement, and probes an idle connection. Data that follow a probe would begin the count
again, so both ends ping often. Where the kernel cannot (it is not Linux), the lease alone counts.

**A process that stands still** on a live host may come back: its kernel still acknowledges, and
only pings without an answer show it. Silence of less than `lease_s` does no harm. A stopped agent
(SIGSTOP) cannot end its child. So it sends its child beats: one without them ends itself.

    0 silence ─ lease_s ─ agent ends its child ─ child without beats ends ─ driver gives up
"""

from __future__ import annotations

import errno
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

CLOSE_S = 2.0
_PROBE_S = 1
"""Between keep-alive probes of an idle connection; the kernel counts in whole seconds."""
_SILENT_ERRORS = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
SILENT_LOOKS = 8
"""A child ends itself after so many looks in a row that find nothing. One would not do: if both
were stopped and run again, the child may look before its agent has had its turn."""


@dataclass(frozen=True)
class KeepAlive:
    """When one end gives up the other, in seconds.

    Attributes:
        ping_interval, ping_timeout, close_timeout: of the WebSocket.
        host_timeout: without an acknowledgement by the other's kernel.
    """

    ping_interval: float
    ping_timeout: float
    close_timeout: float
    host_timeout: float

    @property
    def longest_s(self) -> float:
        """The most time between the beginning of silence and the end of the connection."""
        return self.ping_interval + self.ping_timeout + self.close_timeout

    def watch_host(self, sock: Any) -> None:
        """Have the kernel end the connection to a host that is lost."""
        options = {"TCP_USER_TIMEOUT": int(self.host_timeout * 1000)}
        options |= dict.fromkeys(("TCP_KEEPIDLE", "TCP_KEEPINTVL"), _PROBE_S)
        with suppress(OSError):  # it is closed, and who reads from it will notice
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in options.items():
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def agent_keep_alive(lease_s: float, host_timeout_s: float) -> KeepAlive:
    ping_s, close_s = min(lease_s / 4, host_timeout_s / 8), min(CLOSE_S, lease_s / 4)
    return KeepAlive(ping_s, 1.25 * lease_s, close_s, host_timeout_s / 2)


def driver_keep_alive(lease_s: float, host_timeout_s: float) -> KeepAlive:
    """Return when the driver gives up an agent: after the agent, or its child, has ended."""
    agent = agent_keep_alive(lease_s, host_timeout_s)
    return KeepAlive(agent.ping_interval, 2 * lease_s, agent.close_timeout, host_timeout_s)


def beat_s(lease_s: float) -> float:
    return lease_s / 4


def look_s(lease_s: float) -> float:
    return 1.5 * lease_s / SILENT_LOOKS


def is_host_silent(closed: BaseException) -> bool:
    """Whether the kernel has ended a WebSocket because the other host does not answer."""
    return getattr(closed.__cause__, "errno", None) in _SILENT_ERRORS
