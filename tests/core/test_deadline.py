"""Deadlines count down, and stop at zero."""

from __future__ import annotations

import math
import time

import pytest

from sparkdl.core.deadline import Deadline


def test_deadline_counts_down_and_stops_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: 100.0)
        deadline, never = Deadline.after(5.0), Deadline.after(None)
        for now_s, left_s in ((100.0, 5.0), (104.5, 0.5), (105.0, 0.0), (1e9, 0.0)):
            patch.setattr(time, "monotonic", lambda now_s=now_s: now_s)
            assert (deadline.remaining_s, deadline.wait_s) == (left_s, left_s)
            assert deadline.has_passed is (left_s == 0.0)
            assert (never.remaining_s, never.wait_s, never.has_passed) == (math.inf, None, False)
