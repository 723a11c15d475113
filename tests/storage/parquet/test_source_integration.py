"""What Spark wrote is read as Spark itself would give it to `mapInArrow`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from sparkdl.storage.parquet.read import read_share
from sparkdl.storage.parquet.source import list_files

QUERY = """
    select id, cast(id as float) / 3 as part, cast(id as decimal(9, 2)) as price,
        cast(id as decimal(30, 5)) as large, timestamp_micros(id * 1000001) as instant,
        cast('2024-05-06 07:08:09.123456' as timestamp_ntz) as local, date_add('2024-01-01',
        cast(id as int)) as day, array(cast(id as float), null) as list,
        map('k', timestamp_micros(id)) as times, named_struct('type', 1Y, 'size', cast(null as int),
        'indices', cast(null as array<int>), 'values', array(0D, 1D)) as vector,
        if(id % 3 = 0, null, 'text') as text, cast('ab' as binary) as bytes, id % 2 as half
    from range(100)
"""


def test_files_of_spark_are_read_as_by_spark(spark_local: SparkSession, tmp_path: Path) -> None:
    folder = str(tmp_path / "data")
    spark_local.sql(QUERY).write.partitionBy("half").parquet(folder)
    frame: Any = spark_local.read.parquet(folder).drop("half")
    kind = spark_local.conf.get("spark.sql.session.timeZone")

    source = list_files(folder)
    batches = [batch for share in source.shares(3) for batch in read_share(share)]
    ours = pa.Table.from_batches(batches, source.schema).sort_by("id")

    is_new = hasattr(frame, "toArrow")  # Spark 3.5 has none
    table = frame.toArrow() if is_new else pa.Table.from_batches(frame._collect_as_arrow())
    theirs = table.sort_by("id")
    in_utc = [str(field.type).replace(f"tz={kind}", "tz=UTC") for field in theirs.schema]
    assert ours.schema.names == theirs.schema.names
    assert [str(field.type) for field in ours.schema] == in_utc
    assert ours.equals(theirs.cast(ours.schema))
