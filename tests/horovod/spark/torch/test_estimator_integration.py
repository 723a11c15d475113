"""Horovod's `TorchEstimator` and `TorchModel` on Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sparkdl.core.errors import ConfigError
from tests.horovod.spark.common.linear import rows_of, settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.torch


def estimator(model: Any = None, **options: Any) -> Any:
    import torch

    from sparkdl.horovod.spark.torch import TorchEstimator

    torch.manual_seed(0)
    model = model or torch.nn.Linear(2, 1)
    given = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5),
        "loss": lambda output, label: torch.nn.functional.mse_loss(output, label),
        "input_shapes": [[-1, 2]],
        **options,
    }
    return TorchEstimator(**settings(**given))


@pytest.mark.smoke
def test_what_cannot_work_is_refused_before_anything_starts(spark_ml: SparkSession) -> None:
    frame = rows_of(spark_ml)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"optimizer": None}, "optimizer is not set"),
        ({"loss": None}, "loss is not set"),
        ({"loss_weights": [1.0, 2.0]}, "loss_weights needs to be a list with the same length"),
        ({"callbacks": [print]}, "callbacks must be empty"),
        ({"backward_passes_per_step": 2}, "backward_passes_per_step=2 .* multiply batch_size"),
        ({"train_minibatch_fn": print}, "train_minibatch_fn=.* is not supported"),
        ({"input_shapes": [[-1, 2], [-1]]}, "input_shapes has 2 shapes, and needs one for each"),
        ({"feature_cols": ["x", "w"]}, "column count 2 must equal model inputs count 1"),
    ]
    for options, text in cases:
        with pytest.raises(ConfigError, match=text):
            estimator(**options).fit(frame)
