"""`TorchModel` and `predict` on Spark: lazy, typed, refused early, saved and loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark import SparkFiles
from pyspark.errors import PythonException
from pyspark.ml import PipelineModel
from pyspark.ml.functions import array_to_vector
from pyspark.sql import DataFrame, functions as f

from sparkdl import TorchModel, predict
from sparkdl.core.errors import ConfigError
from sparkdl.ml import model_file
from tests.doubles.until import until
from tests.ml.conftest import ROWS
from tests.ml.models import linear
from tests.ml.torch_models import two_in_two_out

pytestmark = [pytest.mark.torch]


def expected() -> Any:
    return linear([[i, 1, 2 * i] for i in range(ROWS)]) + np.arange(ROWS)[:, None]


def test_module_scores_is_saved_and_loaded_in_a_pipeline(frame: DataFrame, tmp_path: Path) -> None:
    stage: Any = TorchModel(two_in_two_out()).setBatchSize(7)
    stage.setInputMapping({"x": "left", "id": "right"})
    stage.setOutputTypes({"scores": "vector", "next": "bigint"}).setHandleInvalid("skip")
    PipelineModel([stage]).save(str(tmp_path / "pipeline"))
    loaded = PipelineModel.load(str(tmp_path / "pipeline"))
    holes = frame.withColumn("x", f.when(f.col("id") != 9, array_to_vector(f.col("x"))))
    for each in (stage, loaded):
        scored = each.transform(holes)
        assert scored.dtypes[3:] == [("scores", "vector"), ("next", "bigint")]
        found = {row.id: (row.scores, row.next) for row in scored.collect()}
        assert found.keys() == set(range(ROWS)) - {9}
        for i, (scores, after) in found.items():
            assert np.allclose(scores.toArray(), expected()[i])
            assert after == i + 1


@pytest.mark.usefixtures("as_files")
@pytest.mark.smoke
def test_file_of_a_model_leaves_the_disk_once_no_plan_needs_it(frame: DataFrame) -> None:
    def scored() -> tuple[DataFrame, list[Path]]:
        stage: Any = TorchModel(two_in_two_out()).setOutputTypes({"scores": "vector", "n": "int"})
        found: DataFrame = stage.setInputMapping({"x": "left", "id": "right"}).transform(frame)
        return found.select("n"), [stage._file.path, Path(SparkFiles.get(stage._file.path.name))]

    first, files = scored()
    other, _ = scored()
    assert first.count() == other.count() == ROWS
    assert all(file.stat().st_size for file in files), "its model is gone, its plan is not"
    del first

    def is_released() -> bool:
        model_file._release(frame.sparkSession.sparkContext)
        return not files[0].stat().st_size  # new executors ask for a file that Spark knows

    assert until(is_released)
    last, _ = scored()
    assert last.agg(f.sum("n")).first() == other.agg(f.sum("n")).first()
    assert not files[1].exists() or not files[1].stat().st_size


def test_what_cannot_work_is_refused_before_anything_runs(frame: DataFrame) -> None:
    with pytest.raises(ConfigError, match=r"does not know its model: make it as TorchModel\(mod"):
        TorchModel().transform(frame)
    stage: Any = TorchModel(two_in_two_out())
    with pytest.raises(ConfigError, match=r"the inputs left, right: setInputMapping\(.* features"):
        stage.transform(frame)
    inputs = {"x": "left", "id": "right"}
    for given, match in (
        ({"input_mapping": {"x": "left", "id": "size"}}, r"'size'.* left .*, right .*\[scale\]"),
        ({}, "types: declare scores, for example setOutputTypes"),
        (
            {"output_mapping": {"output_0": "n"}, "output_types": {"s": "vector"}},
            "does not contain its outputs' types: declare n, for example",
        ),
        ({"input_shapes": {"y": [3]}}, "input_shapes names 'y'"),
    ):
        with pytest.raises(ConfigError, match=match):
            stage.copy()._set(**{"input_mapping": inputs, **given}).transform(frame)


def calls() -> Any:
    """Make a function that tells how often it was made and called in its process."""
    import builtins

    builtins.made = getattr(builtins, "made", 0) + 1  # type: ignore[attr-defined]
    sizes: list[int] = []

    def fn(columns: dict[str, Any]) -> dict[str, Any]:
        sizes.append(len(columns["id"]))
        shape = columns["x"].shape
        return {
            "made": np.full(shape[0], builtins.made),  # type: ignore[attr-defined]
            "call": [len(sizes)] * shape[0],
            "shape": [list(shape)] * shape[0],
            "text": [text.upper() for text in columns["a.b"]],
            "half": columns["x"][:, 0] / 2,
        }

    return fn


def test_function_is_made_once_in_a_worker_and_called_with_full_batches(frame: DataFrame) -> None:
    schema = "made int, call long, shape array<int>, text string, half float"
    named = frame.withColumn("a.b", f.concat(f.lit("r"), "`a.b`"))
    scored = predict(named, calls, ["id", "x", "a.b"], schema, batch_size=20, keep=["id"])
    for _ in range(2):  # two jobs, in one worker
        rows = scored.collect()
    assert [row.id for row in rows] == list(range(ROWS))
    assert {row.made for row in rows} == {1}
    assert [row.shape for row in rows] == [[20, 3]] * 40 + [[10, 3]] * 10
    assert len({row.call for row in rows}) == 3
    assert [(row.text, row.half) for row in rows] == [(f"R{i}", i / 2) for i in range(ROWS)]


def test_function_may_return_the_only_column_and_shapes_its_input(frame: DataFrame) -> None:
    def sums() -> Any:
        return lambda columns: columns["x"].sum(axis=(1, 2))

    holes = frame.withColumn("x", f.when(f.col("id") != 3, f.col("x")))
    found = predict(
        holes, sums, ["x"], "double", input_shapes={"x": [3, 1]}, handle_invalid="keep", keep=False
    ).collect()
    assert [r.prediction for r in found] == [None if i == 3 else 3.0 * i + 1 for i in range(ROWS)]


def test_function_that_fails_is_named_with_rows_and_partition(frame: DataFrame) -> None:
    def fails() -> Any:
        def fn(columns: dict[str, Any]) -> Any:
            if 30 in columns["id"]:
                raise KeyError("thirty")
            return ["text"] * len(columns["id"])

        return fn

    scored = predict(frame, fails, ["id"], "string", batch_size=16)
    with pytest.raises(PythonException, match=r"fails\(\) failed on rows 16 to 31, partition 0: K"):
        scored.collect()
    scored = predict(frame, fails, ["id"], "label float", batch_size=16)
    with pytest.raises(PythonException, match=r"rows 0 to 15.*'label' is declared as float, and a"):
        scored.collect()


@pytest.mark.parametrize("model_per", ["slot", "executor"])
def test_row_that_fails_has_an_error_others_their_results(frame: DataFrame, model_per: str) -> None:
    def fails() -> Any:
        def fn(columns: dict[str, Any]) -> Any:
            if bad := sorted({3, 30, 31} & set(columns["id"])):
                raise KeyError(int(bad[0]))
            return columns["id"] * 2

        return fn

    holes = frame.withColumn("id", f.when(f.col("id") != 40, f.col("id")))
    how: dict[str, Any] = {"batch_size": 16, "error_col": "why", "model_per": model_per}
    found = predict(holes, fails, ["id"], "twice long", keep=["a.b"], **how).collect()
    failed = {i: row.why for i, row in enumerate(found) if row.why is not None}
    assert [row.twice for row in found] == [None if i in failed else 2 * i for i in range(ROWS)]
    assert {i: failed[i] for i in (3, 30, 31)} == {i: f"KeyError: {i}" for i in (3, 30, 31)}
    assert re.search("rows 40 to 40, partition 0: column 'id' holds nulls", failed[40])
    assert len(failed) == 4
    skipped = predict(holes, fails, ["id"], "twice long", handle_invalid="skip", **how)
    assert skipped.where("why is null").count() == ROWS - 4
    assert skipped.count() == ROWS - 1


@pytest.mark.parametrize("model_per", ["slot", pytest.param("executor", marks=pytest.mark.smoke)])
def test_calls_of_an_async_function_wait_for_one_another(frame: DataFrame, model_per: str) -> None:
    def make() -> Any:
        import asyncio

        together, count = asyncio.Event(), 0

        async def fn(columns: dict[str, Any]) -> Any:
            nonlocal count
            count += 1
            if count == 10:
                together.set()
            if count > 2:  # a scorer's tasks learn by the first answer that it is async
                await asyncio.wait_for(together.wait(), 30)
            if 33 in columns["id"]:
                raise ConnectionError("no answer")
            return columns["id"] * 2

        return fn

    how: dict[str, Any] = {"batch_size": 1, "error_col": "why", "model_per": model_per}
    found = predict(frame.coalesce(1), make, ["id"], "twice long", keep=["a.b"], **how).collect()
    assert [row.twice for row in found] == [None if i == 33 else 2 * i for i in range(ROWS)]
    assert [row.why for row in found if row.why] == ["ConnectionError: no answer"]


def test_predict_refuses_what_cannot_work_before_anything_runs(frame: DataFrame) -> None:
    import threading

    lock, spark = threading.Lock(), frame.sparkSession
    for change, wrong in (
        ({"input_cols": "x"}, "must be a list of one or more columns"),
        (
            {"input_cols": ["y"]},
            r"name 'y': must name columns of the DataFrame, which are id, a.b, x",
        ),
        ({"schema": "id long"}, "two columns 'id'"),
        ({"error_col": "id"}, "two columns 'id'"),
        ({"error_col": ""}, "error_col='' must be the name of a column"),
        ({"schema": "a flot"}, "no schema of Spark"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"handle_invalid": "drop"}, "handle_invalid='drop' cannot be"),
        ({"model_per": "gpu"}, "model_per='gpu' cannot be: choose one of 'auto', 'slot"),
        ({"make": lambda: lock}, "the variable 'lock' .*Create it inside the function"),
        ({"make": lambda: frame}, "'frame' .*: join the columns of another DataFrame"),
        ({"make": lambda: spark}, "'spark' .*let the function use what the driver has"),
        ({"group_by_length": "a.b"}, "'a.b' must be a column of input_cols, of text.*: x"),
        (
            {"input_cols": ["id"], "group_by_length": "id"},
            "'id' must be a column of input_cols, .*, and is bigint",
        ),
        ({"make": 3}, r"a function that makes .*, or an engine, .*; not int"),
    ):
        arguments: dict[str, Any] = {"make": calls, "input_cols": ["x"], "schema": "y float"}
        with pytest.raises(ConfigError, match=wrong):
            predict(frame, **(arguments | change))
    structs = frame.select(f.struct("id").alias("s"))
    with pytest.raises(ConfigError, match="Give its parts as separate columns"):
        predict(structs, calls, ["s"], "y float")
