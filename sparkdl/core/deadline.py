"""A point in time by which a wait has to end."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Deadline:
    at_s: float  # of the monotonic clock

    @classmethod
    def after(cls, timeout_s: float | None) -> Deadline:
        """Return the deadline `timeout_s` from now; `None` means never."""
        return cls(math.inf if timeout_s is None else time.monotonic() + timeout_s)

    @property
    def remaining_s(self) -> float:
        """Seconds left, never below zero; infinity for a deadline that never passes."""
        return max(0.0, self.at_s - time.monotonic())

    @property
    def wait_s(self) -> float | None:
        """The argument for `Condition.wait` and friends: seconds left, or `None` for no limit."""
        # `Condition.wait` and `select` raise OverflowError for infinity.
        return None if math.isinf(self.at_s) else self.remaining_s

    @property
    def has_passed(self) -> bool:
        return self.remaining_s <= 0.0
