"""`predict(…, checkpoint=…)` on Spark: it goes on after errors and cancelled jobs, row by row."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PythonException
from pyspark.ml.functions import array_to_vector
from pyspark.sql import DataFrame, SparkSession, functions as f

from sparkdl import predict
from sparkdl.core.errors import CheckpointError, ConfigError
from tests.doubles.until import until

ROWS = 400
SIZE = 5
PART = 8 * SIZE


@pytest.fixture
def table(spark_local: SparkSession) -> DataFrame:
    return rows(spark_local, range(ROWS))


def rows(spark: SparkSession, ids: range) -> DataFrame:
    return spark.range(ids.start, ids.stop, numPartitions=4).select(
        f.concat(f.lit("r"), "id").alias("a.key"),
        "id",
        array_to_vector(f.array(f.col("id").cast("double"))).alias("v"),
        f.expr("map('at', timestamp'1500-01-01 00:00:00')").alias("m"),
    )


def recording(folder: Path, factor: int = 2) -> Callable[[], Any]:
    """Return a maker of a function that notes its rows, and waits or fails as files say."""
    seen, bad, slow = folder / "seen", folder / "bad", folder / "slow"

    def make() -> Any:
        def fn(columns: dict[str, Any]) -> Any:
            ids = columns["id"].tolist()
            if bad.exists() and int(bad.read_text()) in ids:
                raise KeyError("bad row")
            with seen.open("a") as file:
                file.write("".join(f"{i}\n" for i in ids))
            if slow.exists() and 399 in ids:
                threading.Event().wait(60)
            return columns["id"] * factor

        return fn

    return make


def seen(folder: Path) -> Counter[int]:
    return Counter(map(int, (folder / "seen").read_text().split()))


def score(frame: DataFrame, folder: Path, make: Any = None, **how: Any) -> DataFrame:
    usual: dict[str, Any] = {"checkpoint": folder / "scores", "key": "a.key"}
    make = make or recording(folder)
    return predict(frame, make, ["id"], "twice long", batch_size=SIZE, **(usual | how))


def committed(spark: SparkSession, folder: Path) -> set[int]:
    there = spark.read.option("recursiveFileLookup", "true").parquet(str(folder / "scores"))
    return {row.id for row in there.select("id").collect()}


def check(found: DataFrame, ids: range) -> None:
    there = sorted(found.collect(), key=lambda row: row.id)
    assert [(r["a.key"], r.id, r.twice) for r in there] == [(f"r{i}", i, 2 * i) for i in ids]


@pytest.mark.smoke
def test_call_after_an_error_scores_rows_without_a_result(table: DataFrame, tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("357")
    with pytest.raises(PythonException, match="bad row"):
        score(table, tmp_path)
    before = committed(table.sparkSession, tmp_path)
    assert len(before) >= PART
    assert 357 not in before
    (tmp_path / "bad").unlink()
    found = score(table, tmp_path)
    check(found, range(ROWS))
    assert found.dtypes == [*table.dtypes, ("twice", "bigint")]
    (row,), (given,) = (each.where("id = 3").collect() for each in (found, table))
    assert (row.v, row.m) == (given.v, given.m)
    counts = seen(tmp_path)
    assert {counts[i] for i in before} == {1}
    assert set(counts) == set(range(ROWS))
    # Of other rows new ones are scored, and those that are not given are left out.
    check(score(rows(table.sparkSession, range(100, ROWS + 3)), tmp_path), range(100, ROWS + 3))
    assert seen(tmp_path) == counts + Counter(range(ROWS, ROWS + 3))


@pytest.mark.smoke
def test_call_after_a_cancelled_job_goes_on_and_late_files_do_not_count(
    table: DataFrame, tmp_path: Path
) -> None:
    spark, errors = table.sparkSession, list[BaseException]()

    def begin() -> None:
        spark.sparkContext.setJobGroup("mine", "to be cancelled", interruptOnCancel=True)
        try:
            score(table, tmp_path)
        except Exception as error:  # noqa: BLE001 (Spark's)
            errors.append(error)

    (tmp_path / "slow").touch()
    thread = threading.Thread(target=begin)
    thread.start()
    folder = tmp_path / "scores"
    assert until(lambda: len([*folder.glob("run-*/[!_.]*.parquet")]) >= 8, 60)
    spark.sparkContext.cancelJobGroup("mine")
    thread.join(60)
    assert len(errors) == 1
    (tmp_path / "slow").unlink()
    before = committed(spark, tmp_path)
    check(score(table, tmp_path), range(ROWS))
    assert {seen(tmp_path)[i] for i in before} == {1}
    # A task of the first call that was not ended yet: it adds rows that the second one scored.
    first, second = sorted(folder.glob("run-*"))
    late = next(second.glob("[!_.]*.parquet"))
    (first / "late.parquet").write_bytes(late.read_bytes())
    check(score(table, tmp_path), range(ROWS))


@pytest.mark.smoke
def test_call_that_cannot_be_continued_is_refused_at_once(table: DataFrame, tmp_path: Path) -> None:
    few = table.limit(20)
    check(score(few, tmp_path, keep=["a.key", "id"]), range(20))
    kept: dict[str, Any] = {"keep": ["a.key", "id"]}
    twice, null = f.when(f.col("id") > 7, 7).otherwise(f.col("id")), f.nullif("id", f.lit(3))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    new = str(tmp_path / "new")
    for frame, change, wrong in (
        (few, kept | {"make": recording(tmp_path, 3)}, "another call, whose function differs. Cal"),
        (few, {}, r"whose schema differs: \['a.key string', 'id bigint', 'twice"),
        (few, kept | {"error_col": "why"}, "whose schema differs"),
        (few, kept | {"key": "id"}, "whose key differs: a.key there, id here"),
        (few, {"key": "idd"}, "key='idd' must be a column .*; did you mean 'id'"),
        (few, {"key": ["id"]}, r"key=\['id'\] must be a column of"),
        (few, {"key": None}, "key=None go together"),
        (few, {"key": "v"}, "'v' is of type vector, by which rows are not found again"),
        (few, {"checkpoint": str(tmp_path / "*")}, "must be a folder, with none of"),
        (few, {"checkpoint": str(tmp_path / "other")}, "holds other files, such as notes.txt"),
        (few, {"checkpoint": "ftp://host/x"}, "cannot read ftp://"),
        (few.withColumn("n", f.lit(None)), {"checkpoint": new}, "'n' is of type void"),
        (few.withColumn("k", twice), {"key": "k", "checkpoint": new}, "13 rows have 7. Give"),
        (few.withColumn("k", null), {"key": "k", "checkpoint": new}, "null in 1 rows"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            score(frame, tmp_path, **change)
    assert not (tmp_path / "new").exists()
    assert seen(tmp_path) == Counter(range(20))
    holes = {"handle_invalid": "skip", "keep": ["v"], "checkpoint": str(tmp_path / "holes")}
    for _ in range(2):
        found = score(few.withColumn("id", f.nullif("id", f.lit(3))), tmp_path, **holes)
        assert found.count() == 19
        assert found.columns == ["v", "twice"]
    assert sum(seen(tmp_path).values()) == 39
    with pytest.raises(CheckpointError, match=r"20 rows have no result .*neither draw nor"):
        drawn = f.udf(lambda: uuid.uuid4().hex).asNondeterministic()()
        score(few.withColumn("k", drawn), tmp_path, key="k", checkpoint=new)
