"""TensorFlowOnSpark's `dfutil`: DataFrames to TFRecord files and back, without a jar.

Runs in: driver, feeder

Uses `sparkdl.data`. `docs/migrating.md` lists the differences from TensorFlowOnSpark.
https://github.com/yahoo/TensorFlowOnSpark/blob/v2.2.5/tensorflowonspark/dfutil.py
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import pyarrow as pa
from pyspark.sql import Row, types as spark
from pyspark.sql.types import StructType

from sparkdl.core.errors import ConfigError, ReadError
from sparkdl.core.files import absolute_url
from sparkdl.data.examples import example_class
from sparkdl.data.files import read_tfrecords, write_tfrecords
from sparkdl.data.infer import Rules, infer_by
from sparkdl.driver.executors.sessions import default_fs, session_of
from sparkdl.storage.systems import locate, open_storage

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "fromTFExample",
    "infer_schema",
    "isLoadedDF",
    "loadTFRecords",
    "loadedDF",
    "saveAsTFRecords",
]

loadedDF: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # noqa: N816
"""The DataFrames that `loadTFRecords` returned, and the folder of each."""

_KINDS = {"int64_list": spark.LongType(), "float_list": spark.DoubleType()}


def saveAsTFRecords(df: DataFrame, output_dir: str) -> None:
    """Write a DataFrame as TFRecord files, a file for each partition, into a new folder.

    Args:
        output_dir: without a scheme it is on Hadoop's default file system.

    Raises:
        ConfigError: if the folder is there already, or cannot be written to.
    """
    folder = _url(df.sparkSession, output_dir)
    storage, path = locate(folder)
    # As Hadoop's output format, with which TensorFlowOnSpark wrote.
    if open_storage(storage).get_file_info(path).type.name != "NotFound":
        raise ConfigError(
            f"{folder} already exists. Remove it, or add files by sparkdl.data.write_tfrecords(df, "
            "path)"
        )
    write_tfrecords(df, folder)


def loadTFRecords(
    sc: SparkContext | SparkSession | None, input_dir: str, binary_features: Sequence[str] = ()
) -> DataFrame:
    """Return the records of TFRecord files as a DataFrame; its schema is inferred from them all.

    Args:
        sc: the SparkContext or session; `None` for the active one.
        input_dir: without a scheme it is on Hadoop's default file system. This process lists it.
        binary_features: bytes features that are binary, even if they could be text.

    Raises:
        ConfigError: if there are no records, or a feature has several kinds of values.
    """
    session = session_of(sc)
    folder = _url(session, input_dir)
    # TensorFlowOnSpark's types: null for an empty list, doubles for floats.
    rules = Rules(is_empty_null=True, floats=pa.float64(), binary=tuple(binary_features))
    df = read_tfrecords(session, folder, infer_by(session, [folder], rules))
    loadedDF[df] = input_dir
    return df


def isLoadedDF(df: DataFrame) -> bool:
    """Return whether `loadTFRecords` returned this very DataFrame."""
    return df in loadedDF


def infer_schema(example: Any, binary_features: Sequence[str] = ()) -> StructType:
    """Return the schema of one Example: bigint, double, string or binary, or arrays of these.

    Args:
        example: a `tf.train.Example`, or one serialised.
        binary_features: bytes features that are binary.
    """

    def kind_of(name: str, feature: Any) -> spark.DataType:
        text = spark.BinaryType() if name in binary_features else spark.StringType()
        kind = feature.WhichOneof("kind")
        one = _KINDS.get(kind, text)
        count = len(getattr(feature, kind).value) if kind else 0
        return spark.ArrayType(one) if count > 1 else one

    features = _parse(example).features.feature
    return StructType(
        [spark.StructField(name, kind_of(name, features[name])) for name in sorted(features)]
    )


def fromTFExample(iter: Iterable[Any], binary_features: Sequence[str] = ()) -> Iterator[Row]:
    """Yield a Row for each Example: a value where a feature has one, a list where it has several.

    A feature without values is None.

    Args:
        iter: Examples, or serialised ones, or pairs of a serialised one and whatever.
        binary_features: bytes features that are binary and become `bytearray`; others are text.

    Raises:
        ReadError: if a record is no Example, or text is not UTF-8.
    """

    def value(name: str, feature: Any) -> Any:
        kind = feature.WhichOneof("kind")
        values = list(getattr(feature, kind).value) if kind else []
        if kind == "bytes_list":
            is_binary = name in binary_features
            values = [bytearray(each) if is_binary else _text(name, each) for each in values]
        if len(values) > 1:
            return values
        return values[0] if values else None

    for record in iter:
        features = _parse(record[0] if isinstance(record, tuple) else record).features.feature
        yield Row(**{name: value(name, features[name]) for name in sorted(features)})


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ReadError(
            f"feature {name!r} holds {value[:20]!r}, which is no text. Name it in binary_features"
        ) from error


def _parse(example: Any) -> Any:
    """Return a message, whether serialised or not."""
    if not isinstance(example, bytes | bytearray | memoryview):
        return example
    from google.protobuf.message import DecodeError

    try:
        return example_class().FromString(bytes(example))
    except DecodeError as error:
        raise ReadError(f"{bytes(example[:20])!r}... is no serialised Example: {error}") from error


def _url(session: SparkSession, path: str) -> str:
    return absolute_url(path, default_fs(session), os.getcwd())
