"""Keep-alive timeouts. The agent always gives up before the driver does.

Runs in: driver, agent

The lease detects a frozen process on a live host. A lost host is detected much sooner
(`HostWatch`).

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

import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

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


CAN_TELL = hasattr(socket, "TCP_INFO")
"""Whether the kernel reports when data and acknowledgements arrived."""
PROBE_S = 1
"""Between keep-alive probes of an idle connection; the kernel counts in whole seconds."""
_AGENT_SHARE = 0.7
_MAX_PROBES = 127
LOOKS = 8
"""At a connection, within its timeout."""
_ASK_SHARE = 0.25
_UNKNOWN = -1
_INFO = struct.Struct("=24xI24x2I60xQ24xI")
"""`tcpi_unacked`, `tcpi_last_data_recv`, `tcpi_last_ack_recv` (both in ms), `tcpi_bytes_acked` and
`tcpi_data_segs_in` of `struct tcp_info` in Linux 4.6 and newer (include/uapi/linux/tcp.h)."""
_ROUNDING_S = 0.02
"""Times in it are rounded to the kernel's clock ticks."""


def agent_timeout_s(host_timeout_s: float) -> float:
    """Return after how much silence an agent gives up the driver's host."""
    return _AGENT_SHARE * host_timeout_s


class HostWatch:
    """Judges whether the host at the other end of a TCP connection is there; `look` at times.

    A process may stand still for long and come back; its kernel still answers. A host that lost its
    power, cable or kernel answers nothing, and TCP itself retries for many minutes before it
    reports an error. Both ends of each connection therefore read TCP's own state (tcp(7),
    TCP_INFO), and give the other up after `host_timeout_s` without an acknowledgement. The kernel's
    keep-alive probes keep an idle connection busy, and cost no process anything.

    Why not the socket option TCP_USER_TIMEOUT? It starts again when data follow a probe, so the
    time until a host is given up varies by a factor of two, and the agent might give up after the
    driver. The kernel sends no probes while data arrive. An end that receives data but no
    acknowledgement therefore sends a ping: both ends then notice a cut in one direction.

    The agent gives up first, and ends its child: its host may live, and only be cut off. The
    driver, which then gives the node's place away, waits for longer.

    Where the kernel has no such report (it is not Linux), no host is ever silent.

    Args:
        timeout_s: after so much silence it is not.

    Attributes:
        is_silent: the last look found it so.
        due_s: seconds from the last look to the first moment at which another may find it so.
        quiet_s: for how long no data had come by then, pings among them.
    """

    def __init__(self, sock: Any, timeout_s: float) -> None:
        self.is_silent = False
        self.due_s = timeout_s
        self.quiet_s = 0.0
        self._sock = sock
        self._timeout_s = timeout_s
        self._bytes_acked = self._data_segs_in = _UNKNOWN
        self._heard_s = self._looked_s = self._acked_s = time.monotonic()
        self._rests_until_s = 0.0
        self._has_asked = False
        with suppress(OSError):  # it is closed, and who reads from it will notice
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
                if hasattr(socket, option):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), PROBE_S)
            if hasattr(socket, "TCP_KEEPCNT"):  # the watch gives up, not the kernel
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _MAX_PROBES)

    def look(self) -> Literal["there", "ask", "silent"]:
        """Judge now; `ask`: send something, so that there is an answer to wait for.

        Why ask: the kernel sends no probes while data come in, and data may come in though nothing
        gets out.
        """
        now_s = time.monotonic()
        if now_s < self._rests_until_s:
            return "there"
        silent_s = self._silent_s(now_s)
        self.due_s = max(0.0, self._timeout_s - silent_s)
        self.is_silent = not self.due_s
        if self.is_silent:
            return "silent"
        quiet_in_s = _ASK_SHARE * self._timeout_s - silent_s
        self._rests_until_s = now_s + quiet_in_s  # nothing is to be done about it before
        is_quiet = quiet_in_s <= 0
        should_ask, self._has_asked = is_quiet and not self._has_asked, is_quiet
        return "ask" if should_ask else "there"

    def _silent_s(self, now_s: float) -> float:
        """Return for how long nothing that this end has sent has been acknowledged."""
        info = self._info()
        if info is None:
            return 0.0
        unacked, data_ms, ack_ms, bytes_acked, data_segs_in = info
        self.quiet_s = data_ms / 1000
        acked_s = now_s - ack_ms / 1000
        # An answer to a probe is an acknowledgement alone. Each segment with data acknowledges as
        # well, if only what had been sent long before: also one that the other end sends again and
        # again because no acknowledgement gets out of here.
        is_alone = data_segs_in == self._data_segs_in and acked_s > self._acked_s + _ROUNDING_S
        if bytes_acked != self._bytes_acked or (not unacked and is_alone):
            self._heard_s = max(self._heard_s, acked_s)
        if now_s - self._looked_s > self._timeout_s / 2:  # this process itself stood still
            self._heard_s = max(self._heard_s, now_s - self._timeout_s / 2)
        self._bytes_acked, self._data_segs_in = bytes_acked, data_segs_in
        self._looked_s, self._acked_s = now_s, acked_s
        return now_s - self._heard_s

    def _info(self) -> tuple[int, int, int, int, int] | None:
        if not CAN_TELL:
            return None
        try:
            info: bytes = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        except OSError:  # it is closed
            return None
        return _INFO.unpack(info) if len(info) == _INFO.size else None
