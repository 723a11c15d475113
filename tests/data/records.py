"""Examples for tests, as protobuf itself serialises and reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkdl.data.examples import KINDS, Kind, example_class
from sparkdl.data.framing import Chunk, frame

LISTS = {kind: name for name, kind in KINDS.items()}

# A feature as a test writes it: its kind and its values; None holds nothing at all.
Feature = tuple[Kind, Sequence[Any]] | None
Features = Mapping[str, Feature]


def fill(message: Any, feature: Feature) -> None:
    if feature is not None:
        kind, values = feature
        list_of = getattr(message, LISTS[kind])
        list_of.SetInParent()  # or an empty list would be none
        list_of.value.extend(values)


def example(features: Features) -> bytes:
    message = example_class()()
    message.features.SetInParent()
    for name, feature in features.items():
        fill(message.features.feature[name], feature)
    data: bytes = message.SerializeToString()
    return data


def features_of(features: Any) -> dict[str, Feature]:
    return {name: _feature(feature) for name, feature in features.feature.items()}


def _feature(feature: Any) -> Feature:
    for kind, name in LISTS.items():
        if feature.WhichOneof("kind") == name:
            return kind, list(getattr(feature, name).value)
    return None


def read_example(data: bytes) -> dict[str, Feature]:
    return features_of(example_class().FromString(data).features)


def chunk(records: Iterable[bytes]) -> Chunk:
    """Return records that lie one after another, four bytes between them."""
    found, places, at = list(records), [], 0
    for record in found:
        places.append(at)
        at += len(record) + 4
    return Chunk("file", found, places)


def framed(records: Sequence[bytes]) -> bytes:
    return frame(records)


def write(path: Path, records: Sequence[bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(framed(records))
    return path
