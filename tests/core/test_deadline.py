"""Deadlines count down on the clock they are given, and stop at zero."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparkdl.core.deadline import Deadline


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_deadline_counts_down_and_stops_at_zero() -> None:
    clock = Clock()
    deadline = Deadline.after(5.0, clock)
    assert (deadline.at_s, deadline.remaining_s, deadline.has_passed) == (105.0, 5.0, False)
    clock.now_s = 104.5
    assert (deadline.remaining_s, deadline.wait_s, deadline.has_passed) == (0.5, 0.5, False)
    clock.now_s = 105.0
    assert (deadline.remaining_s, deadline.wait_s, deadline.has_passed) == (0.0, 0.0, True)
    clock.now_s = 1e9
    assert (deadline.remaining_s, deadline.wait_s, deadline.has_passed) == (0.0, 0.0, True)


def test_no_timeout_never_passes_and_waits_without_a_limit() -> None:
    clock = Clock()
    deadline = Deadline.after(None, clock)
    clock.now_s = 1e300
    assert (deadline.remaining_s, deadline.wait_s, deadline.has_passed) == (math.inf, None, False)
