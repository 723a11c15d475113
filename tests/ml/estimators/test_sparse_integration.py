"""Vectors that stay sparse, in estimators, their models and `predict`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession

from sparkdl import KerasEstimator, TorchEstimator, predict
from sparkdl.core.errors import ConfigError
from tests.doubles.lazy import Lazy
from tests.ml.torch_fits import weights_of

torch: Any = Lazy("torch")
pytestmark = pytest.mark.timeout(400)
WIDTH, ROWS = 50, 60


def vector(number: int) -> Any:
    return Vectors.sparse(WIDTH, {number % 5: 1.0, 10 + number % 3: 2.0})


@pytest.fixture
def frame(spark_ml: SparkSession) -> DataFrame:
    """Columns `id`, `words`, `y`, `held`; all vectors have two values."""
    rows = [(n, vector(n), n % 5 / 5 + n % 3, n % 4 == 0) for n in range(ROWS)]
    return spark_ml.createDataFrame(rows, ["id", "words", "y", "held"]).repartition(2)


def torch_model() -> Any:
    class Wide(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(WIDTH, 1))

        def forward(self, words: Any) -> Any:
            assert words.layout == torch.sparse_csr
            return words @ self.weight

    return Wide()


def keras_model() -> Any:
    import keras

    words = keras.Input((WIDTH,), sparse=True)
    return keras.Sequential([words, keras.layers.Dense(1, use_bias=False)])


@pytest.mark.smoke
@pytest.mark.torch
@pytest.mark.tensorflow
@pytest.mark.parametrize("kind", ["torch", "keras"])
def test_estimator_trains_and_model_scores_on_sparse_vectors(frame: DataFrame, kind: str) -> None:
    given: dict[str, Any] = {"features_col": "words", "label_col": "y", "sparse": ["words"]}
    given |= {"validation_indicator_col": "held", "batch_size": 7, "epochs": 3, "num_workers": 2}
    if kind == "torch":
        fitted: Any = TorchEstimator(torch_model, loss="MSELoss", **given).fit(frame)
        (weights,) = weights_of(fitted.getModel())
    else:
        fitted = KerasEstimator(keras_model, loss="mse", **given).fit(frame)
        (weights,) = fitted.getModel().get_weights()
    losses = fitted.history["loss"]
    assert losses[-1] < losses[0]
    assert "val_loss" in fitted.history
    for model_per in ("slot", "executor"):
        scored = fitted.setModelPer(model_per).transform(frame).collect()
        wanted = [vector(row.id).toArray() @ np.reshape(weights, WIDTH) for row in scored]
        found = [float(np.reshape(row.prediction, ())) for row in scored]
        assert found == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("model_per", ["slot", "executor"])
def test_function_is_given_sparse_vectors(frame: DataFrame, model_per: str) -> None:
    def totals() -> Any:
        return lambda columns: columns["words"].tocsr().sum(axis=1)

    given: dict[str, Any] = {"sparse": ["words"], "model_per": model_per, "batch_size": 7}
    found = predict(frame, totals, ["id", "words"], "total double", **given).collect()
    assert [row.total for row in found] == [3.0] * ROWS


def test_columns_that_cannot_stay_sparse_are_refused(frame: DataFrame) -> None:
    for sparse, shapes, reason in (
        (["words"], {"words": [9, 4]}, r"'words', which feeds words .any \[\?, 9, 4\].: must feed"),
        (["y"], {}, "sparse= names 'y', of type double: must name columns of Spark ML vectors"),
        (["id"], {}, "sparse= names 'id': must name columns of the inputs, which are words, y"),
        ("words", {}, "sparse='words': must be a list"),
    ):
        with pytest.raises(ConfigError, match=reason):
            given: Any = {"sparse": sparse, "input_shapes": shapes}
            predict(frame, torch_model, ["words", "y"], "z double", **given)
    estimator: Any = TorchEstimator(torch_model, loss="L1Loss", features_col="words", label_col="y")
    with pytest.raises(ConfigError, match="sparse= names 'id'"):
        estimator.setSparse(["id"]).fit(frame)
