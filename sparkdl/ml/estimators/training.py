"""One training on a cluster of its own: launch, feed, wait, results; and what came of it."""

from __future__ import annotations

import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from pyspark.errors import PySparkException
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame, functions
from pyspark.sql.types import BooleanType, NumericType, StructField, StructType

from sparkdl.core.errors import ConfigError, FeedTypeError, ReadError, ResultError
from sparkdl.core.failure import Code
from sparkdl.core.files import absolute_url
from sparkdl.core.jobs import named_jobs
from sparkdl.core.spec import DEFAULT_FEED
from sparkdl.core.texts import did_you_mean
from sparkdl.driver.executors.scored import addressed, check_distinct, column, tells_cases
from sparkdl.driver.executors.sessions import default_fs
from sparkdl.driver.handle import Cluster
from sparkdl.driver.launch import launch
from sparkdl.ml.estimators.columns import VALIDATION, Columns, by_tensor, outputs_by_column
from sparkdl.ml.scoring.inputs import check_parts, check_sparse, input_columns
from sparkdl.ml.scoring.source import Signature, Tensor
from sparkdl.ml.summary import History, TrainingSummary
from sparkdl.storage.systems import locate, open_storage
from sparkdl.values.types import NUMERIC, spark_family

_log = logging.getLogger(__name__)
Inputs = Mapping[str, Tensor]
"""Column to model input."""


@dataclass(frozen=True)
class Training:
    """The settings of one `fit`.

    Attributes:
        map_fun: runs on every node, with `args`.
        columns: the columns to feed; empty for all.
        validation_col: boolean column that marks the validation rows, if there are any.
        options: of `sparkdl.launch`.
        least_rows: to train on, and to validate with if there are such: one for each node that
            trains.
        refuses_nulls: a null ends the feeding, where numpy would have NaN for it.
        order: of the rows to train on, by `cluster.feed`.
    """

    map_fun: Callable[[Any, Any], Any]
    args: Any
    nodes: int
    epochs: int
    columns: tuple[str, ...]
    validation_col: str | None
    options: Mapping[str, Any] = field(default_factory=dict)
    least_rows: int = 1
    refuses_nulls: bool = False
    order: Mapping[str, Any] = field(default_factory=dict)

    def run(
        self, dataset: DataFrame, take: Callable[[Cluster, Any], None] | None = None
    ) -> TrainingSummary:
        """Train, and return what came of it.

        Args:
            take: is given what the first node returned, while the nodes are still there.

        Raises:
            ConfigError: if a column is missing or of the wrong type, or there are no rows; nothing
                was started.
            FeedTypeError: if a row holds a null and `refuses_nulls`.
            NodeFailedError: if a node failed; and whatever `launch`, `feed` and `wait` raise.
        """
        start_s = time.monotonic()
        training, validation = self.rows(dataset)
        with (
            _nulls_named(),
            _own_checkpoints(dataset, self.options) as options,
            launch(dataset.sparkSession, self.map_fun, self.args, self.nodes, **options) as cluster,
        ):
            if url := cluster.tensorboard_url():
                _log.info("TensorBoard answers at %s", url)
            validating = None
            if validation is not None:
                validating = cluster.feed_async(validation, self.epochs, feed=VALIDATION)
                # By a callback, so that its readers see its end also while this thread waits below.
                validating.add_done_callback(lambda _: cluster.end_feeds(VALIDATION))
            report = cluster.feed(training, self.epochs, **self.order)
            cluster.end_feeds(DEFAULT_FEED)
            cluster.wait()
            if validating is not None:
                validating.result()
            try:
                results = cluster.results()
            except ResultError as error:
                _log.warning("The model was trained, but has no history: %s", error)
                results = []
            if results and take is not None:
                take(cluster, results[0])
        history = history_of(results[0] if results else None)
        warn_of_no_numbers(history.get("loss", ()))
        seconds = time.monotonic() - start_s
        return TrainingSummary(history, report, seconds, tuple(results))

    def rows(self, dataset: DataFrame) -> tuple[DataFrame, DataFrame | None]:
        """Return the rows to train on, and those to validate with."""
        marker = self.validation_col
        names = self.columns or tuple(name for name in dataset.columns if name != marker)
        check_columns(dataset.columns, (*names, *([marker] if marker else [])))
        # Below, Spark finds these by their names, which it may read in any case.
        check_distinct(names, names, tells_cases(dataset))
        placed, found = addressed(dataset)
        used = dict(zip(dataset.columns, found, strict=True))
        places = {n: functions.col(used[n]) for n in (*names, *([marker] if marker else []))}
        columns = [places[name].alias(name) for name in names]
        training, validation = placed.select(*columns), None
        if marker:
            kind = dataset.schema[marker].dataType
            if not isinstance(kind, BooleanType):
                raise ConfigError(
                    f"validation_indicator_col={marker!r} must be a boolean column, and is of type "
                    f"{kind.simpleString()}"
                )
            # A null is neither true nor false to Spark: such rows would be in no part.
            mark = functions.coalesce(places[marker], functions.lit(False))
            training = placed.where(~mark).select(*columns)
            validation = placed.where(mark).select(*columns)
        with named_jobs(dataset.sparkSession, "sparkdl", "fit, first rows"):
            self._check(training, "train on")
            if validation is not None:
                self._check(validation, f"validate with, by validation_indicator_col={marker!r}")
        return self._fed(training), None if validation is None else self._fed(validation)

    def _check(self, rows: DataFrame, use: str) -> None:
        found = len(rows.select(functions.lit(1)).take(self.least_rows))
        if found < self.least_rows:
            raise ConfigError(
                f"the DataFrame has {found} rows to {use}: at least {self.least_rows} must be "
                "there, one for each node that trains"
            )

    def _fed(self, rows: DataFrame) -> DataFrame:
        return rows.select(*map(without_nulls, rows.schema)) if self.refuses_nulls else rows


@contextmanager
def _nulls_named() -> Iterator[None]:
    try:
        yield
    except (PySparkException, ReadError) as error:
        if found := Code.NULL_VALUE.values_in(error):
            raise FeedTypeError(null_advice(found[0])) from error
        raise


@contextmanager
def _own_checkpoints(dataset: DataFrame, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Give a fit a folder of its own: it must not continue what another one has made."""
    parent = options.get("checkpoint_dir")
    if parent is None:
        yield dict(options)
        return
    parent = absolute_url(parent, default_fs(dataset.sparkSession), os.getcwd())
    url = f"{parent.rstrip('/')}/fit-{secrets.token_hex(4)}"
    yield {**options, "checkpoint_dir": url}
    storage, path = locate(url)
    try:
        # Only after success: `yield` raises otherwise, and the folder stays for a look.
        open_storage(storage).delete_dir(path)
    except (OSError, ConfigError) as error:
        _log.warning(
            "The checkpoints of the fit in %s were not deleted: %s. Delete them by hand", url, error
        )


def check_columns(known: Sequence[str], names: Sequence[str]) -> None:
    """Check that a DataFrame with the columns `known` has these."""
    if missing := [name for name in names if name not in known]:
        raise ConfigError(
            f"the DataFrame has no column {', '.join(map(repr, missing))}; its columns are "
            f"{', '.join(known)}{did_you_mean(missing[0], known)}"
        )
    check_distinct(known, names)


# Types come from the schema. To check values would cost a pass over the data: nulls end the
# feeding, see `without_nulls`, and nodes check the lengths of arrays.


def check_schema(columns: Columns, schema: StructType, sparse: Sequence[str] = ()) -> None:
    check_columns(schema.names, columns.names)
    check_sparse(sparse, columns.features, schema)
    for name in columns.features:
        if spark_family(schema[name].dataType) == "other":
            raise _wrong_type(
                schema, name, "features must be numbers, vectors, text, or arrays of them"
            )
    for name in columns.labels:
        if (kind := spark_family(schema[name].dataType)) not in NUMERIC:
            advice = "labels must be numbers, vectors, or arrays of them"
            if kind == "text":
                advice += ": index text first, for example with pyspark.ml.feature.StringIndexer"
            raise _wrong_type(schema, name, advice)
    if columns.weight and not isinstance(schema[columns.weight].dataType, NumericType):
        raise _wrong_type(schema, columns.weight, "weights must be numbers")


def check_fits(inputs: Inputs, schema: StructType) -> None:
    mapping = {name: tensor.name for name, tensor in inputs.items()}
    tensors = {tensor.name: tensor for tensor in inputs.values()}
    input_columns(mapping, Signature(tuple(tensors.values()), ()), schema)


def check_labels(columns: Columns, outputs: Sequence[Tensor], schema: StructType) -> None:
    """Check that columns can be the labels of the model's outputs, as far as it knows them."""
    if columns.has_plain_label or not outputs:
        return
    by_column = outputs_by_column(columns.labels, outputs)
    tensors = {tensor.name: tensor for tensor in outputs}
    for output, names in by_tensor(by_column).items():
        if len(names) > 1:
            check_parts({name: schema[name].dataType for name in names}, tensors[output])


def _wrong_type(schema: StructType, name: str, advice: str) -> ConfigError:
    kind = schema[name].dataType.simpleString()
    return ConfigError(f"column {name!r} is of type {kind}, and {advice}")


def without_nulls(field: StructField) -> Column:
    """Return a column; a null in it fails the job."""
    if not field.nullable:
        return column(field.name)
    text = f"{Code.NULL_VALUE.mark(field.name)} {null_advice(field.name)}"
    # Within the query, so that no further pass over the rows is needed to find nulls.
    failing = functions.raise_error(functions.lit(text))
    return functions.coalesce(column(field.name), failing).alias(field.name)


def null_advice(name: str) -> str:
    return (
        f"column {name!r} holds a null, which cannot be trained with: fill it (df.fillna, or "
        f"coalesce), or leave such rows out, df.dropna(subset=[{name!r}])"
    )


def without_vectors(df: DataFrame) -> list[Column]:
    """Return the columns, vectors as arrays, which Spark can hash and pandas can hold."""
    return [
        vector_to_array(column(field.name)).alias(field.name)
        if isinstance(field.dataType, VectorUDT)
        else column(field.name)
        for field in df.schema.fields
    ]


def warn_of_no_numbers(losses: Iterable[float | None]) -> None:
    """Log a warning if the loss of an epoch is NaN or infinite, as its model's weights may be."""
    for epoch, loss in enumerate(losses, 1):
        if loss is not None and not math.isfinite(loss):
            _log.warning(
                "The loss of epoch %d is %s: do not use this model. Look for NaN and infinite "
                "numbers in the columns, reduce the learning rate, or clip gradients",
                epoch,
                loss,
            )
            return


def history_of(result: Any) -> History:
    """Return the history in what `train_fn` returned: itself, or its entry `history`.

    It is a dict from names to lists of numbers, or of None, like `History.history` of Keras;
    anything else is no history, and gives an empty one.
    """
    if isinstance(result, Mapping) and isinstance(result.get("history"), Mapping):
        result = result["history"]
    if not isinstance(result, Mapping):
        return {}
    return {
        str(name): [None if value is None else float(value) for value in values]
        for name, values in result.items()
        if isinstance(values, (list, tuple)) and all(isinstance(v, Real | None) for v in values)
    }
