"""The features of many records at a time: their places, kinds and values.

Runs in: driver, feeder

Bytes are read as serialisers write them (https://protobuf.dev/programming-guides/encoding/): each
field once, numbers packed. Records in another form, which is as legal, go through protobuf first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError

from sparkdl.data.columns import SEQUENCE_EXAMPLE, Kind
from sparkdl.data.framing import Chunk
from sparkdl.data.protos import message_class
from sparkdl.data.wire import (
    Bools,
    Bytes,
    Fields,
    Ints,
    IrregularError,
    contents,
    decode_varints,
    fields,
    gather,
    only_field,
)

T = TypeVar("T")

_FIRST = 1 << 3 | 2  # the tag of field 1, as of those below
_SECOND = 2 << 3 | 2
_UNKNOWN = 255
# A table, so that an array of tags is looked up at once.
_KIND_OF_TAG = np.full(256, _UNKNOWN, np.uint8)
_KIND_OF_TAG[[0, *(kind << 3 | 2 for kind in Kind)]] = [0, *Kind]


class Spans(NamedTuple):
    """Messages in the bytes of records.

    Attributes:
        record: the record of each; ascending.
        start: of its content, as is `end`.
    """

    record: Ints
    start: Ints
    end: Ints


class Lists(NamedTuple):
    """Features of one name, or the steps of a feature list.

    Attributes:
        record: the record, or the feature list, of each; ascending.
        kind: of each a `Kind`, or 0 if it holds nothing at all.
        start: of the content of its list of values, as is `end`.
    """

    record: Ints
    kind: Bytes
    start: Ints
    end: Ints

    def where(self, mask: Bools) -> Lists:
        """Return some of them."""
        return Lists._make(array[mask] for array in self)


@dataclass(frozen=True)
class Records:
    """Records of a chunk, taken apart as far as their features.

    Attributes:
        data: what spans are in: the chunk's bytes, or what protobuf made of them.
        features: by name, the `Feature` messages of `Example` or of the context.
        feature_lists: by name, the `FeatureList` messages.
    """

    chunk: Chunk
    data: Bytes
    features: Mapping[str, Spans]
    feature_lists: Mapping[str, Spans]

    def __len__(self) -> int:
        return len(self.chunk.starts)

    def lists(self, features: Spans) -> Lists:
        """Return what `Feature` messages hold."""
        tag, start, end = only_field(self.data, features.start, features.end)
        kind = _KIND_OF_TAG[tag]
        if (kind == _UNKNOWN).any():
            raise IrregularError
        return Lists(features.record, kind, start, end)

    def steps(self, feature_lists: Spans) -> Lists:
        """Return what the features in `FeatureList` messages hold; `record` counts messages."""
        found = _all_first(fields(self.data, feature_lists.start, feature_lists.end))
        return self.lists(Spans(found.parent, found.start, found.end))

    def values(self, kind: Kind, lists: Lists) -> tuple[pa.Array, Ints]:
        """Return the values of lists of one kind, one after another, and how many each has.

        Returns:
            large_binary, float32 or int64.
        """
        data = self.data
        if kind is Kind.BYTES:
            found = _all_first(fields(data, lists.start, lists.end))
            counts = np.bincount(found.parent, minlength=len(lists.start))
            return gather(data, found.start, found.end), counts
        tag, start, end = only_field(data, lists.start, lists.end)
        if ((tag != _FIRST) & (tag != 0)).any():
            raise IrregularError
        offsets, packed = contents(gather(data, start, end))
        if kind is Kind.INT64:
            numbers, before = decode_varints(packed, offsets)
            return pa.array(numbers), np.diff(before)
        if (np.diff(offsets) % 4).any():
            raise IrregularError
        # protobuf's floats are little-endian on any machine.
        return pa.array(packed.view("<f4")), np.diff(offsets) // 4


def take_apart(chunk: Chunk, record_type: str, use: Callable[[Records], T]) -> T:
    """Return what `use` makes of the records of a chunk; it may be called twice.

    Raises:
        RecordError: if a record is no such message.
    """
    try:
        return use(_parse(chunk, record_type))
    except IrregularError:
        # The error does not say which record is odd, so protobuf gets the whole chunk.
        return use(_parse(_normal(chunk, record_type), record_type))


def _parse(chunk: Chunk, record_type: str) -> Records:
    data = chunk.data
    found = fields(data, chunk.starts, chunk.ends)
    by_tag: dict[int, dict[str, Spans]] = {}
    known = (_FIRST, _SECOND) if record_type == SEQUENCE_EXAMPLE else (_FIRST,)
    # An `Example` has no field 2; in a `SequenceExample` it holds the feature lists.
    if record_type != SEQUENCE_EXAMPLE and (found.tag == _SECOND).any():
        record = int(found.parent[np.argmax(found.tag == _SECOND)])
        raise chunk.error(
            record, "the record is a SequenceExample: use the option recordType=SequenceExample"
        )
    if not np.isin(found.tag, known).all():
        raise IrregularError
    for tag in known:
        of_tag = found.tag == tag
        parts = Spans(found.parent[of_tag], found.start[of_tag], found.end[of_tag])
        # A message that comes twice in a record has to be merged.
        if not (np.diff(parts.record) > 0).all():
            raise IrregularError
        by_tag[tag] = _entries(data, parts)
    return Records(chunk, data, by_tag[_FIRST], by_tag.get(_SECOND, {}))


def _normal(chunk: Chunk, record_type: str) -> Chunk:
    """Return the records of a chunk in the form that serialisers write."""
    message_type = message_class(record_type)
    written = []
    for number, (start, end) in enumerate(zip(chunk.starts, chunk.ends, strict=True)):
        try:
            message = message_type.FromString(chunk.data[start:end].tobytes())
        except DecodeError as error:
            raise chunk.error(
                number,
                f"the record is no {record_type}, though its checksum is right: {error}. The "
                "option recordType says which messages a file holds",
            ) from error
        # Fields that are not features would make the record irregular a second time.
        message.DiscardUnknownFields()
        written.append(message.SerializeToString())
    ends = np.cumsum([len(record) for record in written])
    starts = ends - [len(record) for record in written]
    data = np.frombuffer(b"".join(written), np.uint8)
    return Chunk(chunk.path, data, starts, ends, chunk.places)


def _all_first(found: Fields) -> Fields:
    if (found.tag != _FIRST).any():
        raise IrregularError
    return found


def _entries(data: Bytes, maps: Spans) -> dict[str, Spans]:
    """Return the values of a map<string, message> of each record, by key."""
    entries = _all_first(fields(data, maps.start, maps.end))
    pairs = fields(data, entries.start, entries.end)
    # Serialisers write each key before its value, so the two alternate.
    keys, values = (Fields._make(array[half::2] for array in pairs) for half in (0, 1))
    each = np.arange(len(entries.parent))
    if not (
        np.array_equal(keys.parent, each)
        and np.array_equal(values.parent, each)
        and (keys.tag == _FIRST).all()
        and (values.tag == _SECOND).all()
    ):
        raise IrregularError
    record = maps.record[entries.parent]
    coded = gather(data, keys.start, keys.end).dictionary_encode()
    code = coded.indices.to_numpy()
    narrow = np.uint16 if len(coded.dictionary) < 1 << 16 else np.int32  # 16 bits: a radix sort
    order = np.argsort(code.astype(narrow), kind="stable")
    bounds = np.searchsorted(code[order], np.arange(len(coded.dictionary) + 1))
    by_key = {}
    for number, key in enumerate(coded.dictionary.to_pylist()):
        mine = order[bounds[number] : bounds[number + 1]]
        spans = Spans(record[mine], values.start[mine], values.end[mine])
        if not (np.diff(spans.record) > 0).all():
            raise IrregularError  # the same key twice: the last one counts
        try:
            by_key[key.decode()] = spans
        except UnicodeDecodeError as error:
            raise IrregularError from error
    return by_key
