"""`TFModel.transform` on Spark: lazy, columns kept, types declared, nulls, several outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, functions as f

from sparkdl.core.errors import ConfigError
from sparkdl.ml.scoring.model import TFModel
from tests.ml.conftest import ROWS, Saved
from tests.ml.models import linear

pytestmark = pytest.mark.tensorflow


def model(path: str, **params: Any) -> Any:
    return TFModel({"export_dir": path, **params})


def expected() -> Any:
    return linear([[i, 1, 2 * i] for i in range(ROWS)])


def test_saved_model_scores_and_keeps_the_columns(saved: Saved, frame: DataFrame) -> None:
    stage = model(saved.exported).setInputMapping({"x": "x"}).setBatchSize(7)
    (output,) = stage.transform(frame.limit(0)).columns[3:]
    scored = stage.setOutputMapping({output: "y"}).transform(frame)
    assert scored.dtypes == [*frame.dtypes, ("y", "array<float>")]
    found = scored.collect()
    assert [row["a.b"] for row in found] == [str(i) for i in range(ROWS)]
    assert np.allclose([row.y for row in found], expected())


def test_older_spark_hands_over_all_columns(
    saved: Saved, frame: DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(f, "arrow_udf", raising=False)
    holes = frame.withColumn("x", f.expr("if(id = 7, null, x)"))
    stage = model(saved.keras).setInputMapping({"x": "x"}).setHandleInvalid("skip")
    scored = stage.setOutputTypes({"y": "vector"}).transform(holes)
    assert scored.dtypes == [*frame.dtypes, ("y", "vector")]
    found = {row.id: row.y.toArray() for row in scored.collect()}
    assert found.keys() == set(range(ROWS)) - {7}
    assert all(np.allclose(y, expected()[i]) for i, y in found.items())


def test_transform_starts_no_job(saved: Saved, frame: DataFrame) -> None:
    context = frame.sparkSession.sparkContext
    tracker = context.statusTracker()
    context.setJobGroup("transform", "transform must be lazy")
    try:
        model(saved.keras).setInputMapping({"x": "x"}).transform(frame)
        assert list(tracker.getJobIdsForGroup("transform")) == []
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]


def test_several_inputs_and_outputs_of_declared_types(saved: Saved, frame: DataFrame) -> None:
    stage = (
        model(saved.two)
        .setInputMapping({"l": "left", "id": "right"})
        .setOutputMapping({"twice": "t", "sum": "s"})
        .setOutputTypes({"t": "double", "s": "vector"})
        .setKeep(["id"])
    )
    scored = stage.transform(frame.withColumn("l", f.array(f.lit(1.0), f.lit(2))))
    assert scored.dtypes == [("id", "bigint"), ("t", "double"), ("s", "vector")]
    for row in scored.collect():
        assert row.t == 2.0 * row.id
        assert row.s == Vectors.dense(1.0 + row.id, 2.0 + row.id)
    assert stage.setKeep(False).transform(
        frame.withColumn("l", f.array(f.lit(1), f.lit(2)))
    ).columns == ["t", "s"]


def test_filters_and_aggregates_over_outputs_are_right(saved: Saved, frame: DataFrame) -> None:
    stage = model(saved.two).setInputMapping({"x2": "left", "id": "right"})
    halves = frame.withColumn("x2", f.slice("x", 1, 2))
    scored = stage.setOutputTypes({"twice": "double"}).transform(halves)
    assert scored.where("twice >= 90").agg(f.sum("twice")).first()[0] == 2 * sum(range(45, 50))
    assert scored.where("id < 3").select("twice").count() == 3
    assert scored.limit(2).count() == 2


def test_what_cannot_work_is_refused_before_anything_runs(saved: Saved, frame: DataFrame) -> None:
    with pytest.raises(ConfigError, match="does not know its model"):
        TFModel({}).transform(frame)
    stage = model(saved.keras).setInputMapping({"x": "x"})
    with pytest.raises(ConfigError, match=r"two columns 'id'.*results with output_mapping="):
        stage.setOutputMapping({"y": "id"}).transform(frame)
    vary = model(saved.functions, signature_def_key="vary").setInputMapping({"x": "ids"})
    assert vary.setOutputMapping({"count": "n"}).transform(frame).first().n == 3
