"""Any function of columns, applied to a DataFrame: lazily, with its model loaded once per worker.

Runs in: driver
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, functions
from pyspark.sql.types import ArrayType, BinaryType, StringType, StructField, StructType

from sparkdl.core.errors import ConfigError
from sparkdl.driver.executors.scored import (
    Keep,
    arrow_schema,
    by_position,
    check_names,
    kept_columns,
    result_schema,
    tells_cases,
)
from sparkdl.driver.payload import dumps, unpicklable
from sparkdl.ml.model_file import ModelFile
from sparkdl.ml.params import TABLE
from sparkdl.ml.scoring.checkpoint import scored_once
from sparkdl.ml.scoring.columns import OutputColumn
from sparkdl.ml.scoring.engines import Engine, Generator, is_engine
from sparkdl.ml.scoring.identity import identity
from sparkdl.ml.scoring.inputs import input_columns
from sparkdl.ml.scoring.share import sharing_of
from sparkdl.ml.scoring.source import ANY, Signature, Tensor, source_of_content
from sparkdl.ml.scoring.task import Score, ScoreBatches
from sparkdl.values.ndarrays import Array

Columns = dict[str, Array]
_STRUCT = "outputs"
SCORE_ROWS = 1024
"""Rows that a function is given at once, if nothing else is said."""


def predict(  # noqa: PLR0913 (what a model has as parameters)
    frame: DataFrame,
    make: Callable[[], Callable[[Columns], Any]] | Engine,
    input_cols: Sequence[str],
    schema: str | StructType,
    *,
    batch_size: int = SCORE_ROWS,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    keep: Keep = True,
    handle_invalid: str = "error",
    error_col: str | None = None,
    model_per: str = "auto",
    sparse: Sequence[str] = (),
    checkpoint: str | Path | None = None,
    key: str | None = None,
    group_by_length: str | None = None,
) -> DataFrame:
    """Return the DataFrame with columns of results; lazy, no job runs but with `checkpoint`.

    `make()` is called once in each Python worker of Spark (see `model_per`) and must load the
    model. The worker retains the returned function for all further partitions, and calls it with
    columns to get columns:

        def make():
            encoder = SentenceTransformer("all-MiniLM-L6-v2")
            return lambda columns: encoder.encode(list(columns["text"]))

        predict(df, make, ["text"], "embedding array<float>", batch_size=64)

    The function may be `async`, for requests to a server: up to 16 batches of a task are then in
    flight, `batch_size` rows each, and the results keep the order of the rows.

    Before `make` runs, environment variables limit the worker to its share of the machine. It gets
    as many threads as the task has cores (`OMP_NUM_THREADS`, `TF_NUM_INTRAOP_THREADS`) and the GPUs
    assigned by Spark (`CUDA_VISIBLE_DEVICES`). TensorFlow takes only as much of a GPU's memory as
    it needs (`TF_FORCE_GPU_ALLOW_GROWTH`). Variables that are set on the executors stay.

    Args:
        make: travels by cloudpickle, with the objects that it refers to. An object with the
            methods `open()`, `generate(columns)` and `close()` is an engine: it travels unopened,
            and `generate`, which may be `async`, is the function. For prompts there are
            `VLLMEngine`, `AsyncVLLMEngine` and `TransformersEngine`.
        input_cols: the function's input columns, given as read-only arrays by name: numbers of the
            column's own dtype [rows], arrays of equal length [rows, …], ML vectors float64 [rows,
            size], text and bytes as objects [rows]. Arrays of different lengths are objects [rows],
            each an array; see `sparkdl.values.columns.convert`.
        schema: the columns of results, for example `"label int, score float"`. The function
            returns a dict (or DataFrame of pandas) with a value for each of them: an array
            [rows, …] or a list; where one is declared, its values alone will do.
        batch_size: rows that the function gets at once, at most.
        input_shapes: column to the shape of its rows, for arrays that are stored flat:
            `{"image": [3, 224, 224]}`.
        keep: the columns of the DataFrame that stay: all, none, or the named ones.
        handle_invalid: how to treat a row with a null in an input column: `error` fails, `skip`
            leaves it out, `keep` gives it null results.
        error_col: name of a further column, of text: the error of a row that fails, whose results
            are null; null for others. A batch that fails is scored again in halves, until the row
            that fails is alone. A model that cannot be loaded still ends the job, as every error
            does without `error_col`.
        model_per: where `make` is called: `slot`: once in each task slot's Python worker;
            `executor`: in one process for each GPU of an executor (or one for the executor), which
            gets the rows of all its slots; `auto`: `executor` where an executor has GPUs and tasks
            have no whole ones, else `slot`.
        sparse: input columns of ML vectors that stay sparse: each is a `scipy.sparse.csr_array`
            float64 [rows, size]. Needs SciPy on the executors.
        checkpoint: a folder, local or of a storage that driver and executors share, in which
            results are kept. The call then scores at once, and returns the results read from there.
            Tasks add a Parquet file for every few batches, so that the same call after a crash or a
            cancelled job scores the rows that lack a result, and those alone. A result belongs to
            its key, whatever else of the row changes; an error in `error_col` is a result, too.
            What `make` reads from files or a server is not compared with the call before.
        key: the column that tells rows apart, with `checkpoint`: no nulls, no value twice, and
            the same at each call.
        group_by_length: an input column of text, bytes or arrays: of every eight batches, rows of
            like lengths are scored together, for models that pad a batch to its longest row.

    Raises:
        CheckpointError: if the files of `checkpoint` cannot be read or written, or keys change.
        ConfigError: if a column is missing or cannot be an array, two would have one name, `schema`
            cannot be read, or `make` cannot be pickled. Later failures are an `InferenceError` or
            `FeedTypeError` in Spark's error, which names the rows and the partition.
    """
    given = {"batch_size": batch_size, "handle_invalid": handle_invalid, "model_per": model_per}
    for name, value in given.items():
        try:
            TABLE[name].converted(value)
        except TypeError as error:
            raise ConfigError(f"{name}={value!r}: {error}") from None
    signature = Signature(_inputs(frame, input_cols, input_shapes or {}), ())
    results = result_schema(schema)
    if isinstance(make, Generator):
        make._check(frame.schema, input_cols, results.names)
    columns = tuple(OutputColumn(x.name, x.name, x.type, "function") for x in arrow_schema(results))
    score = Score(
        source_of_content(_pickled(make, results.names), "function"),
        f"the function of {_name(make)}",
        input_columns({name: name for name in input_cols}, signature, frame.schema, sparse),
        columns,
        batch_size,
        handle_invalid,
        sharing_of(frame.sparkSession, model_per),
        error_col,
        None if group_by_length is None else _place(frame, input_cols, group_by_length),
    )
    if error_col == "":
        raise ConfigError("error_col='' must be the name of a column, or None")
    if error_col is not None:
        results = StructType([*results.fields, StructField(error_col, StringType())])
    if (checkpoint is None) != (key is None):
        raise ConfigError(
            f"checkpoint={checkpoint!r} and key={key!r} go together: a folder, and the column that "
            "tells its rows apart"
        )
    if checkpoint is not None and key is not None:
        kept = [frame.columns[index] for index in kept_columns(frame.columns, keep)]
        return scored_once(frame, score, results, kept, key, str(checkpoint), identity(make))
    return scored(frame, score, results, keep)


def _inputs(
    frame: DataFrame, names: Sequence[str], shapes: Mapping[str, Sequence[int]]
) -> tuple[Tensor, ...]:
    if isinstance(names, str) or not names:
        raise ConfigError(f"input_cols={names!r} must be a list of one or more columns")
    if unknown := [name for name in (*names, *shapes) if name not in frame.columns]:
        raise ConfigError(
            f"input_cols and input_shapes name {', '.join(map(repr, unknown))}: must name columns "
            f"of the DataFrame, which are {', '.join(frame.columns)}"
        )
    return tuple(
        Tensor(name, ANY, (None, *shapes[name]) if name in shapes else None) for name in names
    )


def _place(frame: DataFrame, names: Sequence[str], column: str) -> int:
    kind = frame.schema[column].dataType if column in names else None
    if not isinstance(kind, StringType | BinaryType | ArrayType):
        raise ConfigError(
            f"group_by_length={column!r} must be a column of input_cols, of text, bytes or arrays"
            + (f", and is {kind.simpleString()}" if kind else f": {', '.join(names)}")
        )
    return list(names).index(column)


def _pickled(make: Any, names: Sequence[str]) -> bytes:
    if not (callable(make) or is_engine(make)):
        raise ConfigError(
            "predict takes a function that makes the one to call, or an engine, an object with "
            f"the methods open, generate and close; not {type(make).__name__}"
        )
    try:
        return dumps((make, tuple(names)))
    except Exception as error:
        what = "; ".join(unpicklable(make)) or "something that it refers to"
        raise ConfigError(
            f"{_name(make)} goes to the executors by pickle, which refuses {what} "
            f"({type(error).__name__}: {error}). Create it inside the function. Executors have no "
            "Spark session: join the columns of another DataFrame to the one that is scored, or "
            "let the function use what the driver has collected"
        ) from error


def _name(make: Any) -> str:
    if is_engine(make):
        return type(make).__name__  # its options may have secrets
    return f"{make.__qualname__}()" if hasattr(make, "__qualname__") else repr(make)


def scored(
    frame: DataFrame,
    score: Score,
    results: StructType,
    keep: Keep,
    named_by: Callable[[str], str] = lambda _: "schema",
    file: ModelFile | None = None,
) -> DataFrame:
    """Return `frame` with the outputs' columns; starts no job.

    Spark 4.1 and later hand the inputs' columns alone to Python. Spark 4.0 hands over all columns.

    Args:
        file: the score's model, which is kept as long as the outputs may be asked for.
    """
    kept = kept_columns(frame.columns, keep)
    names = [frame.columns[index] for index in kept]
    check_names(names, results.names, named_by, tells_cases(frame))
    indices = tuple(frame.columns.index(column.name) for column in score.inputs)
    if not hasattr(functions, "arrow_udf"):
        task = ScoreBatches(score, indices, kept)
        if file is not None:
            file.keep_for(None, frame.sparkSession)
        fields = [*(frame.schema.fields[index] for index in kept), *results.fields]
        return by_position(frame).mapInArrow(task, StructType(fields))
    # Spark 4.3 would pass on a scan's columns without making rows: slow for kept columns, and
    # an error for vectors. All rows pass this filter, but Spark makes rows for it.
    placed = by_position(frame).where(functions.spark_partition_id() >= 0)
    inputs = [functions.col(f"c{index}") for index in indices]
    # Otherwise Spark's optimizer may copy the call: into a filter, once for each output.
    structs = functions.arrow_udf(score.structs, results).asNondeterministic()
    placed = placed.withColumn(_STRUCT, structs(*inputs))
    if file is not None:
        file.keep_for(structs, frame.sparkSession)
    if score.handle_invalid == "skip":
        placed = placed.where(functions.col(_STRUCT).isNotNull())
    return placed.select(
        *(functions.col(f"c{p}").alias(name) for p, name in zip(kept, names, strict=True)),
        *(functions.col(_STRUCT)[name].alias(name) for name in results.names),
    )
