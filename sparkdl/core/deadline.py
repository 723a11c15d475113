"""A point in time by which a wait has to end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Deadline:
    at_s: float
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def after(
        cls, timeout_s: float | None, clock: Callable[[], float] = time.monotonic
    ) -> Deadline:
        """Return the deadline `timeout_s` from now; `None` means never."""
        return cls(math.inf if timeout_s is None else clock() + timeout_s, clock)

    @property
    def remaining_s(self) -> float:
        """Seconds left, never below zero; infinity for a deadline that never passes."""
        return max(0.0, self.at_s - self.clock())

    @property
    def wait_s(self) -> float | None:
        """The argument for `Condition.wait` and friends: seconds left, or `None` for no limit."""
        # `Condition.wait` and `select` raise OverflowError for infinity.
        return None if math.isinf(self.at_s) else self.remaining_s

    @property
    def has_passed(self) -> bool:
        return self.remaining_s <= 0.0
