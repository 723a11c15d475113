"""The files and rows of a Parquet data set, as Spark would read it, and each node's share.

Runs in: driver, agent

    source = list_files("s3://bucket/train", columns=["features", "label"])
    shares = source.shares(num_nodes)      # one for each node, as JSON to its agent
    for batch in read_share(shares[rank]): ...  # there, see `read.py`
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, chain, groupby
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from sparkdl.control.messages import MAX_MESSAGE_NBYTES
from sparkdl.control.rows import DataFile, FileRange, Share, Storage
from sparkdl.core.errors import ConfigError
from sparkdl.core.row_ranges import Range, uncovered
from sparkdl.storage.systems import find_files, locate, open_storage

# Reading a footer is waiting for the storage, so there may be more threads than cores.
_FOOTER_THREADS = 16
# Arrow's offset of a string, binary or list, beside its bytes.
_VARIABLE_NBYTES = 4
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}
_NAME_THEM = "Name the columns that all files have, once each"

F = TypeVar("F")
INT96_UNIT = "s"
"""Schemas are read with INT96 in seconds: no other timestamp of a Parquet file has this unit."""


@dataclass(frozen=True)
class ParquetSource:
    """The files of a data set, and their columns and rows.

    Attributes:
        schema: of every batch that is read.
        row_groups: for each file, how many rows each of its row groups has.
        stored_as, refuses_nulls: see `Share`.
        numbering: see `CallShape`.
    """

    storage: Storage
    schema: pa.Schema
    files: tuple[DataFile, ...]
    row_groups: tuple[tuple[int, ...], ...]
    stored_as: tuple[str, ...] = ()
    refuses_nulls: tuple[str, ...] = ()
    numbering: str = ""

    @property
    def num_rows(self) -> int:
        return sum(map(sum, self.row_groups))

    def shares(
        self,
        num_nodes: int,
        seed: int | None = None,
        done: Sequence[Range] = (),
        in_turns: bool = False,
    ) -> list[Share]:
        """Return what each node reads, see `plan`."""
        schema = self.schema.serialize().to_pybytes()
        return [
            Share(
                *(self.storage, schema, *own_files(self.files, ranges)),
                *(self.stored_as, self.refuses_nulls),
            )
            for ranges in plan(self.row_groups, num_nodes, seed, done, in_turns)
        ]

    def check_fits(self, num_nodes: int) -> None:
        """Check that a node's share fits into a message, cut by rows that are done as well."""
        if len(msgspec.json.encode(self.shares(num_nodes)[0])) > MAX_MESSAGE_NBYTES // 2:
            raise ConfigError(
                f"its {len(self.files)} files with {sum(map(len, self.row_groups))} row groups are "
                f"too many for one message to each of {num_nodes} nodes. Write fewer and larger "
                "files (row groups of some 100 MB), feed a part at a time, or use more nodes"
            )


@dataclass(frozen=True)
class _Footer:
    """The facts at the end of a file; `schema` holds all columns as they will be read."""

    schema: pa.Schema
    row_groups: tuple[int, ...]
    row_nbytes: int


def list_files(
    paths: str | Sequence[str],
    columns: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> ParquetSource:
    """Find Parquet files and read their footers, several at a time.

    Files in `key=value` folders are read; the keys are no columns.

    Args:
        paths: folders, files or patterns, all in one storage, see `storage.locate`; local ones
            must be there on all nodes.
        columns: which columns, in this order; None means all.
        options: how to open the storage, see `storage.locate`. They go to the agents.
    """
    asked = [paths] if isinstance(paths, str) else list(paths)
    located = [locate(path, dict(options or {})) for path in asked]
    if len({storage.uri for storage, _ in located}) > 1:
        raise ConfigError(f"{', '.join(asked)} are in different storages; name one at a time")
    if not located:
        raise ConfigError("no path was given: paths= must name a folder, a file or a pattern")
    if columns is not None and (not columns or len(set(columns)) < len(columns)):
        raise ConfigError(f"columns is {list(columns)}; name at least one, and each once")
    storage = located[0][0]
    system = open_storage(storage)
    found = _find(system, asked, [path for _, path in located])
    footers = read_footers(found, lambda path: _read_footer(system, path, columns))
    schema = _agreed_schema(found, footers, columns)
    files = tuple(
        DataFile(path, footer.row_nbytes) for path, footer in zip(found, footers, strict=True)
    )
    return ParquetSource(storage, schema, files, tuple(f.row_groups for f in footers))


def _find(system: pafs.FileSystem, asked: Sequence[str], paths: Sequence[str]) -> list[str]:
    found: set[str] = set()
    for name, path in zip(asked, paths, strict=True):
        here = set(find_files(system, path))
        if not here:
            raise ConfigError(
                f"{name}: no Parquet file found. Hidden names (with _ or . in front) and folders "
                "that are not named key=value do not count, as in Spark. For files in other "
                "folders, give a pattern, such as path/*/*.parquet"
            )
        found.update(here)
    # Sorted, because nodes that list by themselves must number the rows alike.
    return sorted(found)


def read_footers(files: Sequence[str], read: Callable[[str], F]) -> list[F]:
    """Return `read`'s result for each file, several at a time; raise its first error."""
    pool = ThreadPoolExecutor(min(_FOOTER_THREADS, len(files)), "sparkdl-parquet-footer")
    try:
        return list(pool.map(read, files))
    finally:
        # After the first error the other footers are not needed.
        pool.shutdown(cancel_futures=True)


def _read_footer(system: pafs.FileSystem, path: str, columns: Sequence[str] | None) -> _Footer:
    try:
        with pq.ParquetFile(
            path, filesystem=system, coerce_int96_timestamp_unit=INT96_UNIT
        ) as file:
            fields = [pa.field(each.name, spark_type(each.type)) for each in file.schema_arrow]
            schema = pa.schema(fields)
            wanted = set(schema.names if columns is None else columns)
            rows = (file.metadata.row_group(i).num_rows for i in range(file.num_row_groups))
            return _Footer(schema, tuple(rows), row_nbytes(file.metadata, wanted))
    except pa.ArrowInvalid as error:
        raise ConfigError(
            f"{path} is not a Parquet file, or is damaged: {error}. Write it again, or leave it "
            "out with a pattern such as path/*.parquet"
        ) from error
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}. Give a path that the driver and all nodes may read"
        ) from error


def row_nbytes(footer: pq.FileMetaData, names: set[str]) -> int:
    """Estimate what a row takes in memory: encodings make numbers small in the file.

    Args:
        names: which columns; a field of a struct as `column.field`.
    """
    total = 0
    paths = [footer.schema.column(i).path.split(".") for i in range(footer.num_columns)]
    above = [accumulate(path, "{}.{}".format) for path in paths]  # of `a.list.element` also `a`
    leaves = [i for i, each in enumerate(above) if not names.isdisjoint(each)]
    for group in map(footer.row_group, range(footer.num_row_groups)):
        for leaf in map(group.column, leaves):
            if leaf.physical_type in _WIDTHS:
                width = _WIDTHS[leaf.physical_type] * leaf.num_values
                total += max(width, leaf.total_uncompressed_size)
            else:
                total += _VARIABLE_NBYTES * leaf.num_values + leaf.total_uncompressed_size
    return max(1, int(total) // max(1, int(footer.num_rows)))


def _agreed_schema(
    paths: Sequence[str], footers: Sequence[_Footer], columns: Sequence[str] | None
) -> pa.Schema:
    first = footers[0].schema
    names = list(first.names if columns is None else columns)
    for path, footer in zip(paths, footers, strict=True):
        schema = footer.schema
        if schema is not first and schema.equals(first):
            continue
        if missing := [name for name in names if schema.names.count(name) != 1]:
            raise ConfigError(
                f"{path} has no column {missing[0]!r}, or two of that name; its columns are "
                f"{', '.join(map(repr, schema.names))}. {_NAME_THEM}; a folder's key is none"
            )
        others = [name for name in schema.names if name not in names]
        if columns is None and others:
            raise ConfigError(f"{path} has columns that {paths[0]} lacks: {others}. {_NAME_THEM}")
        for name in names:
            kinds = first.field(name).type, schema.field(name).type
            if not kinds[0].equals(kinds[1]):
                raise ConfigError(
                    f"column {name!r} is {kinds[0]} in {paths[0]}, {kinds[1]} in {path}. "
                    "Rewrite the files with one type, or feed them through Spark"
                )
    return pa.schema([first.field(name) for name in names])


def plan(
    row_groups: Sequence[Sequence[int]],
    num_nodes: int,
    seed: int | None = None,
    done: Sequence[Range] = (),
    in_turns: bool = False,
) -> list[list[FileRange]]:
    """Share out all rows except `done` ones so that the nodes' totals differ by at most one.

    The row groups are laid end to end and cut into `num_nodes` lengths, so that at most
    `num_nodes - 1` row groups are read by two nodes or more. Equal arguments, equal results.

    Args:
        row_groups: for each file the rows of each of its row groups; `FileRange.file` counts them.
        seed: shuffles the row groups first; None keeps their order.
        done: numbers of rows, counted through all files.
        in_turns: the nodes take whole row groups in turn, so that rows come in their order; the
            one with the fewest rows comes next.
    """
    groups = list(_groups(row_groups))
    if seed is not None:
        # Python seeds by a text's SHA-512, so every node and every run gets the same order.
        random.Random(f"{seed}/0").shuffle(groups)
    left = [
        FileRange(part.file, part.row_group, first - part.first, last - part.first, first)
        for part in groups
        for first, last in uncovered(*part.numbers, done)
    ]
    shares: list[list[FileRange]] = [[] for _ in range(num_nodes)]
    if in_turns:
        totals = [0] * num_nodes
        for part in left:
            node = totals.index(min(totals))
            shares[node].append(part)
            totals[node] += part.num_rows
        return shares
    total = sum(part.num_rows for part in left)
    node, offset = 0, 0
    for part in left:
        rows, start = part.num_rows, 0
        while start < rows:
            # From the total, not node by node: totals then differ by one row at most.
            end = total * (node + 1) // num_nodes - offset  # of this node, within this range
            stop = min(rows, end)
            if start < stop:
                low, high = part.start + start, part.start + stop
                own = FileRange(part.file, part.row_group, low, high, part.first + start)
                shares[node].append(own)
                start = stop
            if stop == end:
                node += 1
        offset += rows
    return shares


def _groups(row_groups: Sequence[Sequence[int]]) -> Iterator[FileRange]:
    first = 0
    for file, counts in enumerate(row_groups):
        for group, rows in enumerate(counts):
            if rows:
                yield FileRange(file, group, 0, rows, first)
            # Groups that are empty or done count too: numbers do not depend on what is skipped.
            first += rows


def shuffled(share: Share, seed: int | None, epoch: int) -> Share:
    if seed is None:
        return share
    # The remaining rows of a row group may be many ranges, which are read in one go.
    whole = groupby(share.ranges, lambda part: (part.file, part.row_group))
    groups = [tuple(ranges) for _, ranges in whole]
    random.Random(f"{seed}/{epoch}").shuffle(groups)
    return msgspec.structs.replace(share, ranges=tuple(chain.from_iterable(groups)))


def own_files(
    files: Sequence[DataFile], ranges: Sequence[FileRange]
) -> tuple[tuple[DataFile, ...], tuple[FileRange, ...]]:
    numbers: dict[int, int] = {}
    for part in ranges:
        numbers.setdefault(part.file, len(numbers))
    return tuple(files[file] for file in numbers), tuple(
        msgspec.structs.replace(part, file=numbers[part.file]) for part in ranges
    )


def spark_type(kind: pa.DataType) -> pa.DataType:
    """Return the type that columns of `kind` are given.

    ========================================  ================================================
    timestamp with a time zone, INT96         timestamp[us, UTC]
    timestamp without                         timestamp[us]; digits past microseconds are cut
    dictionary                                its values' type
    large or view string, binary              string, binary
    lists of any kind                         list<element>
    decimals of up to 38 digits               decimal128
    date64; fixed-size binary                 date32; binary
    extension types                           their storage
    others, unsigned integers among them      unchanged
    ========================================  ================================================

    Elements, fields and values are nullable at any depth, as Spark reads all files.
    """
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return spark_type(kind.storage_type)
    if types.is_dictionary(kind):
        return spark_type(kind.value_type)
    if types.is_timestamp(kind):
        is_instant = kind.tz is not None or kind.unit == INT96_UNIT
        # Spark writes INT96 as an instant, without a time zone in the file.
        return pa.timestamp("us", "UTC" if is_instant else None)
    if types.is_map(kind):
        return pa.map_(spark_type(kind.key_type), spark_type(kind.item_type))
    if types.is_struct(kind):
        return pa.struct([pa.field(field.name, spark_type(field.type)) for field in kind])
    if types.is_nested(kind) and hasattr(kind, "value_type"):
        return pa.list_(pa.field("element", spark_type(kind.value_type)))
    if types.is_decimal(kind) and kind.precision <= 38:
        return pa.decimal128(kind.precision, kind.scale)
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    is_binary = types.is_large_binary(kind) or types.is_binary_view(kind)
    if is_binary or types.is_fixed_size_binary(kind):
        return pa.binary()
    return pa.date32() if types.is_date64(kind) else kind


def convert(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return `column` as `kind`, its `spark_type`; without a copy where only names differ."""
    if column.type.equals(kind):
        return column
    return pc.cast(column, options=pc.CastOptions(kind, allow_time_truncate=True))


def has_text(kind: pa.DataType) -> bool:
    """Return whether values of `kind` hold strings or bytes, whose decoded size is not known."""
    if pa.types.is_nested(kind):
        return any(has_text(kind.field(i).type) for i in range(kind.num_fields))
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))
