"""Infer the schema of files from all their records.

The summary of a file, or of a part of it, is small and adds up, so files are read in parallel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from sparkdl.control.rows import Storage
from sparkdl.core.errors import ConfigError
from sparkdl.core.jobs import named_jobs
from sparkdl.data.examples import KINDS, Kind, is_utf8, list_type, parsed
from sparkdl.data.framing import Chunk, find, read_file

_LEAVES = {Kind.INT64: pa.int64(), Kind.FLOAT: pa.float32()}


class Seen(msgspec.Struct, frozen=True):
    """A summary of one feature.

    Attributes:
        kinds: the kinds of lists with values, and where the first of each was.
        hollow: the kind of a list without values, if there was one.
        low, high: how many values the shortest and the longest list have.
    """

    kinds: dict[int, str] = {}
    hollow: int = 0
    low: int = 1
    high: int = 1
    is_text: bool = True

    def add(self, other: Seen) -> Seen:
        return Seen(
            # This one's places win: errors name the first list of each kind.
            {**self.kinds, **other.kinds, **self.kinds},
            self.hollow or other.hollow,
            min(self.low, other.low),
            max(self.high, other.high),
            self.is_text and other.is_text,
        )


Features = dict[str, Seen]


def add_up(parts: Iterable[Features]) -> Features:
    total: Features = {}
    for part in parts:
        for name, seen in part.items():
            total[name] = total[name].add(seen) if name in total else seen
    return total


@dataclass(frozen=True)
class Rules:
    """How features become columns.

    Attributes:
        is_empty_null: a feature with one value or none is a value and null, rather than an array.
        binary: features that are binary, even if all values seen are text.
    """

    is_empty_null: bool = False
    floats: pa.DataType = _LEAVES[Kind.FLOAT]
    binary: tuple[str, ...] = ()

    def schema(self, features: Mapping[str, Seen]) -> pa.Schema:
        return pa.schema([(name, self._type(name, features[name])) for name in sorted(features)])

    def _type(self, name: str, seen: Seen) -> pa.DataType:
        if len(seen.kinds) > 1:
            places = [f"{Kind(kind).name.lower()} in {at}" for kind, at in seen.kinds.items()]
            raise ConfigError(
                f"feature {name!r} holds {' and '.join(places)}. Give a schema without it, or with "
                "the type of the one kind and only the files that have it"
            )
        kind = next(iter(seen.kinds), seen.hollow) or Kind.BYTES
        is_binary = name in self.binary or not seen.is_text
        leaf = _LEAVES.get(Kind(kind), pa.binary() if is_binary else pa.string())
        if leaf == _LEAVES[Kind.FLOAT]:
            leaf = self.floats
        is_single = seen.high <= 1 and (self.is_empty_null or seen.low == 1)
        return leaf if is_single else list_type(leaf)


def see(chunks: Iterable[Chunk]) -> Features:
    return add_up(
        {
            name: _seen(f"{chunk.path} at byte {chunk.places[number]}", feature)
            for name, feature in features.items()
        }
        for chunk in chunks
        for number, features in parsed(chunk)
    )


def _seen(place: str, feature: Any) -> Seen:
    name = feature.WhichOneof("kind")
    if name is None:
        return Seen()
    kind, values = KINDS[name], getattr(feature, name).value
    if not len(values):
        # An empty list says little: another kind may have values elsewhere.
        return Seen(hollow=kind, low=0)
    is_text = kind is not Kind.BYTES or all(map(is_utf8, values))
    return Seen({kind: place}, low=len(values), high=len(values), is_text=is_text)


def infer_schema(
    spark: SparkSession, path: str | Sequence[str], storage_options: Mapping[str, Any] | None = None
) -> StructType:
    """Return the schema of files, inferred from all their records by a Spark job.

    Args:
        path: folders, files or patterns.
        storage_options: arguments of the storage's class in `pyarrow.fs`.

    Raises:
        ConfigError: see `Rules.schema` and `framing.find`; and if there are no records.
    """
    return infer_by(spark, [path] if isinstance(path, str) else path, Rules(), storage_options)


def infer_by(
    spark: SparkSession,
    paths: Sequence[str],
    rules: Rules,
    storage_options: Mapping[str, Any] | None = None,
) -> StructType:
    storage, files = find(paths, storage_options or {})
    frame = spark.range(0, len(files), 1, max(len(files), 1))
    with named_jobs(spark, "sparkdl", "schema of TFRecords"):
        rows = frame.mapInArrow(_LookTask(storage, tuple(files)), "seen binary").collect()
    seen = add_up(msgspec.json.decode(bytes(row.seen), type=Features) for row in rows)
    if not seen:
        raise ConfigError(
            f"{', '.join(paths)}: no record has a feature, so no schema can be inferred. Give one: "
            "read_tfrecords(spark, path, schema)"
        )
    return from_arrow_schema(rules.schema(seen))


@dataclass(frozen=True)
class _LookTask:
    storage: Storage
    files: tuple[str, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            seen = [
                msgspec.json.encode(see(read_file(self.storage, self.files[number])))
                for number in batch.column(0).to_pylist()
            ]
            yield pa.record_batch({"seen": pa.array(seen, pa.binary())})
