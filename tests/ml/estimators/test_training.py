"""What the driver says of a finished training."""

from __future__ import annotations

import pytest

from sparkdl.ml.estimators.training import warn_of_no_numbers


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([0.5, float("nan"), float("nan")], ["The loss of epoch 2 is nan"]),
        ([0.5, float("inf")], ["The loss of epoch 2 is inf"]),
        ([None, 1.0, 0.0], []),
    ],
)
def test_loss_that_is_no_number_is_told_once_with_its_epoch(
    losses: list[float | None], said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_no_numbers(losses)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == said
