"""A DataFrame with the outputs of a model as columns; lazy.

Runs in: driver
"""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import DataFrame, functions
from pyspark.sql.types import StructType

from sparkdl.core.errors import ConfigError
from sparkdl.driver.executors.scored import Keep, by_place, check_names, kept_columns
from sparkdl.ml.scoring.parquet_task import ScoreFiles
from sparkdl.ml.scoring.scan import file_columns
from sparkdl.ml.scoring.task import Score, ScoreBatches, ScoreStructs

_STRUCT = "outputs"


@dataclass(frozen=True)
class Scoring:
    """What `score` does, the columns it adds, and the columns of the DataFrame that stay.

    Attributes:
        parquet_reader: see `scan.file_columns`.
    """

    score: Score
    results: StructType
    keep: Keep
    parquet_reader: str = "auto"


def scored(frame: DataFrame, scoring: Scoring) -> DataFrame:
    """Return `frame` with the outputs' columns; starts no job.

    Spark 4.1 and later hand the inputs' columns alone to Python, or, where Python can read them
    from Parquet files itself, no more than where each row is. Spark 4.0 hands over all columns.

    Raises:
        ConfigError: if a column is missing, or two would have one name, or the rows are not
            where `parquet_reader` has them.
    """
    kept = kept_columns(frame.columns, scoring.keep)
    names = [frame.columns[place] for place in kept]
    check_names(names, scoring.results.names)
    places = tuple(frame.columns.index(column.name) for column in scoring.score.inputs)
    if not hasattr(functions, "arrow_udf"):
        if scoring.parquet_reader == "python":
            raise ConfigError(
                "parquet_reader='python' needs Spark 4.1 or later; leave it at 'auto'"
            )
        task = ScoreBatches(scoring.score, places, kept)
        fields = [*(frame.schema.fields[place] for place in kept), *scoring.results.fields]
        return by_place(frame).mapInArrow(task, StructType(fields))
    placed = by_place(frame)
    files = file_columns(frame, places, scoring.parquet_reader)
    if files is None:
        answer = ScoreStructs(scoring.score).structs
        # Spark 4.3 would hand on a scan's columns as such, which is slow for those that are kept,
        # and an error for vectors. All rows pass this filter, but Spark makes rows for it.
        placed = placed.where(functions.spark_partition_id() >= 0)
        inputs = [functions.col(f"c{place}") for place in places]
    else:
        answer = ScoreFiles(scoring.score, files).structs
        row = placed.metadataColumn("_metadata")
        inputs = [row["file_path"], row["row_index"]]
    # Otherwise Spark's optimizer may copy the call: into a filter, once for each output.
    structs = functions.arrow_udf(answer, scoring.results).asNondeterministic()
    placed = placed.withColumn(_STRUCT, structs(*inputs))
    if scoring.score.handle_invalid == "skip":
        placed = placed.where(functions.col(_STRUCT).isNotNull())
    return placed.select(
        *(functions.col(f"c{p}").alias(name) for p, name in zip(kept, names, strict=True)),
        *(functions.col(_STRUCT)[name].alias(name) for name in scoring.results.names),
    )
