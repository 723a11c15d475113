"""A short soak: faults at random, and each row is in the model as often as it was fed."""

from __future__ import annotations

import pytest

from tests.faults.soak import soak


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_soak_loses_nothing() -> None:
    score = soak(run_s=12.0, seed=7, wait_s=1.2)
    assert score.is_clean, str(score)
    assert score.recovered == score.injected.total() > 0, str(score)
