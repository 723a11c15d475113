"""What the driver says of a finished training."""

from __future__ import annotations

from typing import Any

import pytest

from sparkdl.horovod.spark.common.estimator import _losses
from sparkdl.ml.estimators.training import warn_of_no_numbers


@pytest.mark.parametrize(
    "history",
    [
        {"loss": [0.5, float("nan"), float("nan")], "auc": [0.5]},
        [{"epoch": n, "train": {"loss": loss}} for n, loss in enumerate([0.5, float("inf")])],
    ],
)
def test_loss_that_is_no_number_is_told_once_with_its_epoch(
    history: Any, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_no_numbers(_losses(history))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(
        ("The loss of epoch 2 is nan", "The loss of epoch 2 is inf")
    )


@pytest.mark.parametrize(
    "history", [{"loss": [1.0, 0.0]}, {"train_loss": float("nan")}, {}, [], None]
)
def test_losses_that_are_numbers_or_missing_are_not(
    history: Any, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_no_numbers(_losses(history))
    assert not caplog.records
