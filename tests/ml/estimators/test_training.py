"""What the driver says of a finished training."""

from __future__ import annotations

import pytest

from sparkdl.ml.estimators.training import warn_of_no_numbers


@pytest.mark.parametrize("losses", [[0.5, float("nan"), float("nan")], [0.5, float("inf")]])
def test_loss_that_is_no_number_is_told_once_with_its_epoch(
    losses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_no_numbers(losses)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(
        ("The loss of epoch 2 is nan", "The loss of epoch 2 is inf")
    )


@pytest.mark.parametrize("losses", [[1.0, 0.0], [None, 1.0], []])
def test_losses_that_are_numbers_or_missing_are_not(
    losses: list[float | None], caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_no_numbers(losses)
    assert not caplog.records
