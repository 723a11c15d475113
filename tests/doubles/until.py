"""Waits for what tells nobody when it comes."""

from __future__ import annotations

import threading
from collections.abc import Callable

from sparkdl.core.deadline import Deadline


def until(is_true: Callable[[], object], within_s: float = 30.0, look_s: float = 0.02) -> bool:
    """Look until something is true; return whether it was so in time."""
    deadline, never = Deadline.after(within_s), threading.Event()
    while not is_true():
        if deadline.has_passed:
            return False
        never.wait(look_s)
    return True
