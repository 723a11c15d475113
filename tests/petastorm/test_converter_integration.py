"""`make_spark_converter` on Spark: what is written, and read by nodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import sparkdl
from sparkdl.core.errors import ConfigError
from sparkdl.core.options import Feeding
from sparkdl.petastorm.spark import SparkDatasetConverter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.torch
_CONF = SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF


@pytest.fixture
def cached(spark_local: SparkSession, tmp_path: Path) -> Iterator[Path]:
    """The folder that Spark's setting names."""
    spark_local.conf.set(_CONF, f"file://{tmp_path}/cache")
    yield tmp_path / "cache"
    spark_local.conf.unset(_CONF)


def frame(spark: SparkSession, rows: int = 40) -> DataFrame:
    from pyspark.ml.feature import VectorAssembler
    from pyspark.mllib.util import MLUtils

    df = spark.range(rows).selectExpr("id", "double(id) as a")
    df = VectorAssembler(inputCols=["a", "id"], outputCol="v").transform(df)
    df = MLUtils.convertVectorColumnsFromML(df.withColumn("old", df["v"]), "old")
    return df.selectExpr("id", "a", "v", "old", "array(double(id)) as `b.c`")


def read(args: dict[str, Any], ctx: Any) -> list[int]:
    with args["converter"].make_torch_dataloader(8, num_epochs=1) as loader:
        return sorted(int(i) for batch in loader for i in batch["id"])


@pytest.mark.smoke
def test_dataframe_is_written_as_float32_and_read_by_rank_everywhere(
    spark_local: SparkSession, cached: Path
) -> None:
    df = frame(spark_local)
    converter = sparkdl.make_spark_converter(df)
    assert len(converter) == 40
    with converter.make_torch_dataloader(40, 1, shuffle_row_groups=False) as loader:
        (rows,) = loader
    assert {name: str(rows[name].dtype) for name in rows} == {
        **{"id": "torch.int64", "a": "torch.float32"},
        **{"b.c": "torch.float32", "v": "torch.float32", "old": "torch.float32"},
    }
    order = np.argsort(rows["id"].numpy())
    assert rows["v"].numpy()[order].tolist() == [[i, i] for i in range(40)]

    alone: dict[str, Any] = {"framework": "plain", "executor": "local"}
    alone["feeding"] = Feeding(fed=False)
    shares = sparkdl.run(None, read, {"converter": converter}, 2, **alone)
    assert sorted(shares[0] + shares[1]) == list(range(40))

    converter.delete()
    assert not list(cached.iterdir())


def test_missing_setting_is_an_error_that_has_the_line_to_write(spark_local: SparkSession) -> None:
    with pytest.raises(ConfigError, match=rf"spark\.conf\.set\('{_CONF}', 'file:///"):
        sparkdl.make_spark_converter(spark_local.range(3))
