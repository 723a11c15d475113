"""`dfutil` with Spark: DataFrames are saved and loaded as TensorFlowOnSpark's programs do it."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from sparkdl.core.errors import ConfigError
from sparkdl.data.examples import Kind
from sparkdl.tfos import dfutil
from tests.doubles.sessions import jobs_of

INT64, BYTES = Kind.INT64, Kind.BYTES


def test_what_is_saved_is_loaded(spark_local: SparkSession, tmp_path: Path) -> None:
    frame = spark_local.sql(
        "select id as label, array(cast(id as float), 1F) as image, concat('é', id) as text, "
        "cast('ab' as binary) as bytes from range(20)"
    ).repartition(2)
    folder = str(tmp_path / "data")
    dfutil.saveAsTFRecords(frame, folder)
    assert "sparkdl: write TFRecords" in {job.description for job in jobs_of(spark_local)}
    with pytest.raises(ConfigError, match="already exists"):
        dfutil.saveAsTFRecords(frame, folder)

    loaded = dfutil.loadTFRecords(spark_local.sparkContext, folder, ["bytes"])
    assert loaded.schema.simpleString() == (
        "struct<bytes:binary,image:array<double>,label:bigint,text:string>"
    )
    columns = loaded.columns
    assert sorted(loaded.collect()) == sorted(frame.select(columns).collect())
    assert dfutil.isLoadedDF(loaded)
    assert not dfutil.isLoadedDF(frame)
    assert dfutil.loadedDF[loaded] == folder
    count = len(dfutil.loadedDF)
    del loaded
    gc.collect()
    assert len(dfutil.loadedDF) == count - 1  # they do not keep frames alive
