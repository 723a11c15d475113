"""`TFEstimator.fit` on Spark: what train_fn is given, what comes back, what goes wrong."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from sparkdl.core.errors import ConfigError, LaunchError
from sparkdl.core.options import Feeding, Roles
from sparkdl.driver.options import Observe
from sparkdl.ml.estimators import training
from sparkdl.ml.estimators.estimator import TFEstimator
from sparkdl.ml.scoring.model import TFModel
from tests.ml import train_fns

ROWS = 40


@pytest.fixture
def frame(spark_ml: SparkSession) -> DataFrame:
    """Columns `x`, `z` (numbers), `held` (every fourth)."""
    return spark_ml.range(ROWS, numPartitions=2).selectExpr(
        "cast(id as double) as x", "id * 10 as z", "id % 4 = 0 as held"
    )


def plain(train_fn: Any, **args: Any) -> Any:
    return TFEstimator(train_fn, args).setFramework("plain").setFeeding(Feeding(timeout_s=60))


def test_train_fn_gets_rows_by_mapping_marked_apart_and_all_arguments(frame: DataFrame) -> None:
    estimator = plain(train_fns.read, batch_size=7, epochs=1, mine="x")
    estimator.setEpochs(2).setInputMapping({"z": "b", "x": "a"}).setValidationIndicatorCol("held")
    model = estimator.fit(frame)
    (result,) = model.summary.results
    held = sum(range(0, ROWS, 4))
    total = 2 * (sum(range(ROWS)) - held)
    assert result["sums"] == {"a": total, "b": 10 * total}
    assert result["tensors"] == ["a", "b"]
    assert result["args"] == {
        "batch_size": 7, "epochs": 2, "mine": "x", "steps": 1000, "framework": "plain",
    }  # fmt: skip
    assert result["role"] == "chief"
    rows = 2 * (ROWS - ROWS // 4)
    assert model.history == {"rows": [rows], "loss": [0.5, 0.25], "val_x": [held] * 2}
    assert model.summary.feed.rows_used == rows
    assert isinstance(model, TFModel)
    assert model.getInputMapping() == {"z": "b", "x": "a"}


def test_validation_rows_that_nobody_reads_and_results_that_cannot_travel_do_no_harm(
    frame: DataFrame, caplog: pytest.LogCaptureFixture
) -> None:
    model = plain(train_fns.ignore_validation).setValidationIndicatorCol("held").fit(frame)
    assert model.hasSummary
    assert model.history == {}
    assert "has no history" in caplog.text


@pytest.mark.parametrize(
    ("estimator", "match"),
    [
        (plain(train_fns.read).setInputMapping({"gone": "a"}), "no column 'gone'"),
        (plain(train_fns.read).setValidationIndicatorCol("x"), "must be a boolean column"),
        (plain(train_fns.read).setValidationIndicatorCol("gone"), "no column 'gone'"),
        (plain(train_fns.read).setNumPS(1), "do not leave room for a worker beside 1 ps, chief"),
        (plain(train_fns.read, cluster_size="two"), "cluster_size='two' in tf_args"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(
    frame: DataFrame, estimator: Any, match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        estimator.fit(frame)


class Board:
    """A cluster that has a TensorBoard, and takes no rows."""

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *_: object) -> None: ...

    def tensorboard_url(self) -> str:
        return "http://chief:6006"

    def feed(self, *_: Any, **__: Any) -> None:
        raise LaunchError("no nodes here")


def test_ps_and_tensorboard_are_asked_of_the_launch_and_its_address_is_told(
    frame: DataFrame, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: dict[str, Any] = {}

    def launch(_spark: Any, _map_fun: Any, _args: Any, nodes: int, **options: Any) -> Board:
        asked.update(options, nodes=nodes)
        return Board()

    caplog.set_level(logging.INFO, "sparkdl")
    monkeypatch.setattr(training, "launch", launch)
    estimator = plain(train_fns.read).setClusterSize(3).setNumPS(1).setDriverPSNodes(True)
    with pytest.raises(LaunchError, match="no nodes here"):
        estimator.setTensorboard(True).setModelDir("/logs").fit(frame)
    assert asked["nodes"] == 3
    assert asked["roles"] == Roles(ps=1, ps_on_driver=True, chief="chief")
    assert asked["observe"] == Observe(tensorboard="/logs")
    assert "TensorBoard answers at http://chief:6006" in caplog.text
