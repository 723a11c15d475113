"""Horovod's `KerasEstimator` and `KerasModel` on Spark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import SparseVector, Vectors, VectorUDT
from pyspark.sql.types import DoubleType

from sparkdl.core.errors import ConfigError
from sparkdl.horovod.spark.common.backend import SparkBackend
from sparkdl.horovod.spark.common.store import Store
from tests.horovod.spark.common.linear import WEIGHTS, rows_of, settings, with_wrong_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.tensorflow, pytest.mark.torch]


def linear(outputs: int = 1) -> Any:
    import keras

    keras.utils.set_random_seed(0)
    x = keras.Input([2])
    found = [keras.layers.Dense(1)(x) for _ in range(outputs)]
    return keras.Model(x, found[0] if outputs == 1 else found)


def estimator(**options: Any) -> Any:
    import keras

    from sparkdl.horovod.spark.keras import KerasEstimator

    given = {
        "model": options.get("model") or linear(),
        "optimizer": keras.optimizers.SGD(0.05, momentum=0.5),
        "loss": "mse",
        **options,
    }
    return KerasEstimator(**settings(**given))


@pytest.mark.deep  # that of PyTorch is the proof of the processes; KerasEstimator's, of the fit
def test_loaded_pipeline_fits_two_outputs_to_transformed_rows_of_parquet_files(
    spark_ml: SparkSession, tmp_path: Path
) -> None:
    import keras
    import pandas as pd

    frame = rows_of(spark_ml)
    store = Store.create(str(tmp_path))
    with_wrong_rows(frame).where("is_val = 0").write.parquet(store.train_path)
    frame.where("is_val = 1").write.parquet(store.val_path)

    def doubled(rows: Any) -> Any:
        rows["z"] = [values * 2 for values in rows["x"]]
        return pd.concat([rows, rows])  # without an index of its own

    made = estimator(
        model=linear(2),
        loss=[lambda y, p: keras.ops.mean(keras.ops.square(y - p), -1), "mse"],
        loss_weights=[1.0, 0.5],
        metrics=[["mae"], []],
        run_id="run",
        feature_cols=["z"],
        label_cols=["y", "n"],
        transformation_fn=doubled,
        validation=0.1,
        sample_weight_col="w",
        num_proc=None,
        callbacks=[keras.callbacks.TensorBoard(), keras.callbacks.TerminateOnNaN()],
    )
    path = str(tmp_path / "saved")
    Pipeline(stages=[made]).write().save(path)
    loaded: Any = Pipeline.load(path).getStages()[0]
    loaded.setBackend(SparkBackend(2)).setStore(store)
    model = loaded.fit_on_parquet({loaded.epochs: 4})
    history = model.getHistory()
    assert {"loss", "val_loss"} <= set(history)
    assert any(name.startswith("val_") and name.endswith("mae") for name in history)
    assert len(history["loss"]) == 4
    assert history["val_loss"][-1] < 0.5 < history["loss"][0]
    net = model.getModel()
    assert np.allclose(net.get_weights()[0][:, 0], WEIGHTS / 2, atol=0.1)
    assert net.compiled
    assert model.getRunId() == "run"
    assert list((tmp_path / "runs" / "run" / "logs").rglob("*tfevents*"))

    PipelineModel([model]).write().save(f"{path}-model")
    same: Any = PipelineModel.load(f"{path}-model").stages[0]
    rows = frame.withColumn("z", vector_to_array(frame.x))
    scored = same.setOutputCols(["a", "b"]).transform(rows)
    assert isinstance(scored.schema["b"].dataType, DoubleType)
    found = scored.select("z", "y", "a", "b").collect()
    assert all(abs(row.a - row.y / 2) < 0.5 for row in found)
    expected = net(np.array([row.z for row in found], np.float32))
    for name, values in zip("ab", expected, strict=True):
        np.testing.assert_allclose([row[name] for row in found], np.ravel(values), rtol=1e-5)
    with pytest.raises(ConfigError, match=r"must have one name for each label: y, n"):
        same.setOutputCols(["a"]).transform(frame)


@pytest.mark.deep
def test_loaded_model_scores_sparse_vectors(spark_ml: SparkSession) -> None:
    import keras

    from sparkdl.horovod.spark.keras import KerasModel

    net = keras.Sequential([keras.Input([3]), keras.layers.Rescaling(2.0)])
    model = KerasModel(model=net, feature_columns=["v"], label_columns=["l"], _floatx="float32")
    vectors = [(SparseVector(3, {1: 2.0}),), (Vectors.dense(1, 0, 3),)]
    found = model.transform(spark_ml.createDataFrame(vectors, ["v"]))
    assert isinstance(found.schema["l__output"].dataType, VectorUDT)
    assert [list(row.l__output) for row in found.collect()] == [[0, 4, 0], [2, 0, 6]]


@pytest.mark.smoke
def test_what_cannot_work_is_refused_before_anything_starts(spark_ml: SparkSession) -> None:
    from sparkdl.horovod.keras.callbacks import LearningRateWarmupCallback

    frame = rows_of(spark_ml)
    warmup = LearningRateWarmupCallback(0.1)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"loss": None}, "Loss parameter is required"),
        ({"optimizer": None}, "Optimizer must be provided"),
        ({"feature_cols": None}, "feature_cols is not set"),
        ({"feature_cols": ["x", "w"]}, "column count 2 must equal model inputs count 1"),
        ({"feature_cols": ["q"]}, "no column 'q'"),
        ({"backend": object(), "num_proc": None}, "must be a SparkBackend"),
        ({"backend": SparkBackend(1)}, 'At most one of parameters "backend" and "num_proc"'),
        ({"validation": 1.5}, r"must be in the range: \[0, 1\)"),
        ({"validation": 3}, 'must be of type "float" or "str"'),
        ({"train_steps_per_epoch": 3}, "train_steps_per_epoch=3 is not supported: an epoch is"),
        ({"data_module": object}, "data_module=.* is not supported: .*transformation_fn"),
        (
            {"checkpoint_callback": print},
            "checkpoint_callback=.* is not supported: .*EarlyStopping",
        ),
        ({"callbacks": [warmup]}, "WarmupCallback, which works only in horovod.spark.run"),
    ]
    for options, text in cases:
        with pytest.raises(ConfigError, match=text):
            estimator(**options).fit(frame)
    with pytest.raises(ConfigError, match="store is not set"):
        estimator().fit_on_parquet()
