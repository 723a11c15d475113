"""The clock of a node's host, as the driver's: measured by messages there and back, as NTP does.

Runs in: driver

The driver sends a question at `sent` and receives the host's time at `received`. The host read its
clock halfway between, give or take half of the round trip. The fastest of the last few answers
decides. Conversions are final and keep the order of times, so that nested spans stay nested: a
better measurement applies to later times only, and the offset moves towards it by at most a
hundredth of the time that passes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from sparkdl.control.messages import AskClock, ClockTold, ToAgent, Traced
from sparkdl.driver.events import ClockRead, Spanned
from sparkdl.driver.stream import ClusterEvents

_KEPT_SAMPLES = 8
_KEPT_KNOTS = 256
_SLEW = 0.01
_FIRST_CLOCKS = 4
"""How many questions a new host is sent at once; the fastest answer counts."""


@dataclass(frozen=True)
class _Knot:
    """From `local_us` on the offset goes from `offset_us` to `target_us`."""

    local_us: int
    offset_us: float
    target_us: float

    def offset_at(self, local_us: int) -> float:
        most = max(0, local_us - self.local_us) * _SLEW
        return self.offset_us + max(-most, min(most, self.target_us - self.offset_us))


class HostClock:
    """One host's clock. All times in microseconds.

    Attributes:
        error_us: the largest error of the converted times.
    """

    def __init__(self) -> None:
        self.error_us = 0
        self._samples: deque[tuple[int, float]] = deque(maxlen=_KEPT_SAMPLES)
        self._knots: deque[_Knot] = deque(maxlen=_KEPT_KNOTS)
        self._is_used = False

    @property
    def is_known(self) -> bool:
        """Whether there has been an answer."""
        return bool(self._knots)

    def sample(self, sent_us: int, local_us: int, received_us: int) -> None:
        """Take an answer.

        Args:
            sent_us, received_us: by the driver's clock.
            local_us: by the host's.
        """
        took_us = received_us - sent_us
        # Answers that overtook each other cannot be put in the order of the host's times.
        if took_us < 0 or (self._knots and local_us < self._knots[-1].local_us):
            return
        self._samples.append((took_us, (sent_us + received_us) / 2 - local_us))
        took_us, target_us = min(self._samples)
        error_us = took_us // 2 + 1
        # Until the first conversion a better measurement may replace the offset as a whole.
        if not self._is_used:
            self.error_us = error_us
            self._knots.clear()
            self._knots.append(_Knot(local_us, target_us, target_us))
        elif target_us != self._knots[-1].target_us:
            self.error_us = max(self.error_us, error_us)
            offset_us = self._knots[-1].offset_at(local_us)
            self._knots.append(_Knot(local_us, offset_us, target_us))

    def driver_us(self, local_us: int) -> int:
        """Return the driver's time at the host's; there must have been an answer."""
        self._is_used = True
        number = bisect_right(self._knots, local_us, key=lambda knot: knot.local_us)
        return round(local_us + self._knots[max(0, number - 1)].offset_at(local_us))


class ClockQuestions:
    """Asks agents for their hosts' time, and publishes the answers and the spans to date.

    Args:
        send: takes an agent's id and a message.
    """

    def __init__(self, events: ClusterEvents, send: Callable[[str, ToAgent], None]) -> None:
        self._events, self._send = events, send
        self._agents: dict[str, tuple[int, int]] = {}
        """By agent: its node, and how often it has answered."""

    def join(self, agent_id: str, node_id: int) -> None:
        """Begin to ask an agent."""
        self._agents[agent_id] = node_id, 0
        self._ask(agent_id)

    def leave(self, agent_id: str) -> None:
        """Forget an agent."""
        self._agents.pop(agent_id, None)

    def note(self, agent_id: str, message: Traced | ClockTold) -> None:
        """Publish spans or a clock's answer; ask for the time again after spans, and at first."""
        if agent_id not in self._agents:
            return
        node_id, answers = self._agents[agent_id]
        if isinstance(message, Traced):
            self._events.publish(Spanned, agent_id, node_id, message)
        else:
            about = agent_id, node_id, message.sent_us, message.local_us
            self._events.publish(ClockRead, *about)
            self._agents[agent_id] = node_id, answers + 1
        if isinstance(message, Traced) or answers + 1 < _FIRST_CLOCKS:
            self._ask(agent_id)

    def _ask(self, agent_id: str) -> None:
        self._send(agent_id, AskClock(round(self._events.now_s() * 1e6)))
