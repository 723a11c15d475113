"""A DataFrame with the outputs of a model as columns; lazy.

Runs in: driver

Where rows come straight from Parquet files, Spark's Python workers read the model's columns
themselves; `file_columns` finds out whether they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pyarrow as pa
from pyspark.sql import DataFrame, functions
from pyspark.sql.types import StructType

from sparkdl.core.errors import ConfigError
from sparkdl.driver.executors.plan import find_scan
from sparkdl.driver.executors.scored import (
    Keep,
    arrow_schema,
    by_place,
    check_names,
    kept_columns,
    tells_cases,
)
from sparkdl.ml.scoring.files import FileColumns
from sparkdl.ml.scoring.share import sharing_of
from sparkdl.ml.scoring.task import Score, ScoreBatches, ScoreFiles, ScoreStructs

READERS = ("auto", "python", "spark")
"""The readers of the input columns of a DataFrame over Parquet files."""

_STRUCT = "outputs"


def scored(
    frame: DataFrame,
    score: Score,
    results: StructType,
    keep: Keep,
    parquet_reader: str,
    model_per: str,
    named_by: Callable[[str], str] = lambda _: "schema",
) -> DataFrame:
    """Return `frame` with the outputs' columns; starts no job.

    Spark 4.1 and later hand the inputs' columns alone to Python, or, where Python can read them
    from Parquet files itself, no more than where each row is. Spark 4.0 hands over all columns.

    Args:
        results: the columns that are added.
        keep: which columns of the DataFrame stay.
        parquet_reader: see `file_columns`.
        model_per: one of `MODEL_PER`.
        named_by: see `check_names`.

    Raises:
        ConfigError: if a column is missing, or two would have one name, or the rows are not
            where `parquet_reader` has them.
    """
    score = replace(score, sharing=sharing_of(frame.sparkSession, model_per))
    kept = kept_columns(frame.columns, keep)
    names = [frame.columns[place] for place in kept]
    check_names(names, results.names, named_by, tells_cases(frame))
    places = tuple(frame.columns.index(column.name) for column in score.inputs)
    if not hasattr(functions, "arrow_udf"):
        if parquet_reader == "python":
            raise ConfigError(
                "parquet_reader='python' needs Spark 4.1 or later; leave it at 'auto'"
            )
        task = ScoreBatches(score, places, kept)
        fields = [*(frame.schema.fields[place] for place in kept), *results.fields]
        return by_place(frame).mapInArrow(task, StructType(fields))
    placed = by_place(frame)
    files = file_columns(frame, places, parquet_reader)
    if files is None:
        answer = ScoreStructs(score).structs
        # Spark 4.3 would pass on a scan's columns without making rows: slow for kept columns, and
        # an error for vectors. All rows pass this filter, but Spark makes rows for it.
        placed = placed.where(functions.spark_partition_id() >= 0)
        inputs = [functions.col(f"c{place}") for place in places]
    else:
        answer = ScoreFiles(score, files).structs
        row = placed.metadataColumn("_metadata")
        inputs = [row["file_path"], row["row_index"]]
    # Otherwise Spark's optimizer may copy the call: into a filter, once for each output.
    structs = functions.arrow_udf(answer, results).asNondeterministic()
    placed = placed.withColumn(_STRUCT, structs(*inputs))
    if score.handle_invalid == "skip":
        placed = placed.where(functions.col(_STRUCT).isNotNull())
    return placed.select(
        *(functions.col(f"c{p}").alias(name) for p, name in zip(kept, names, strict=True)),
        *(functions.col(_STRUCT)[name].alias(name) for name in results.names),
    )


def file_columns(frame: DataFrame, places: Sequence[int], reader: str) -> FileColumns | None:
    """Return what Python has to read for the columns at `places`; None if Spark hands them over.

    Python reads where rows come from Parquet files in order, through nothing but filters and
    selections, and the columns are as they are in the files. With `auto` the files must be local
    as well, because Spark's access to other storages need not be that of its Python workers.

    Args:
        reader: one of `READERS`.

    Raises:
        ConfigError: with `python`, if that is not so; it says why.
    """
    if reader == "spark":
        return None
    try:
        return _found(frame, places, is_local=reader == "auto")
    except ConfigError as error:
        if reader == "python":
            raise _refusal(str(error)) from None
        return None


def _found(frame: DataFrame, places: Sequence[int], is_local: bool) -> FileColumns:
    if not hasattr(frame, "_jdf"):
        raise ConfigError("Spark Connect does not say where its rows come from")
    scan = find_scan(frame, frame._jdf.queryExecution().withCachedData(), places, is_local)
    names = [scan.stored_as(origin) for origin in scan.origins]
    types = arrow_schema(StructType([frame.schema.fields[place] for place in places])).types
    return FileColumns(
        pa.schema(list(zip(names, types, strict=True))),
        tells_cases(frame),
    )


def _refusal(reason: str) -> ConfigError:
    return ConfigError(
        f"parquet_reader='python', but the DataFrame is not one that Python can read itself: "
        f"{reason}. Leave it at 'auto', or give a DataFrame of spark.read.parquet(…), at most "
        "filtered and selected, with the model's input columns unchanged"
    )
