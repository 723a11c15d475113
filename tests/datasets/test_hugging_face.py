"""A feed as a `datasets.IterableDataset`: its rows and types, and when the rows used are known."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import pyarrow as pa
import pytest

from sparkdl.core.errors import ConfigError, FrameworkMissingError
from sparkdl.datasets.hugging_face import LoadedRows, hf_dataset
from sparkdl.feed.reader.batches import EpochBatches
from tests.doubles.feeds import Arrivals
from tests.doubles.lazy import Lazy, needs

loading: Any = Lazy("torch.utils.data")
pytestmark = [pytest.mark.torch, needs("datasets"), needs("accelerate")]
ROWS = [
    {"id": i, "at": float(i), "tokens": [i] * (i % 3 + 1), "text": f"row {i}"} for i in range(10)
]


def dataset(it: Arrivals, epochs: int = 2, **options: Any) -> Any:
    types = {"id": pa.int32(), "at": pa.float32(), "tokens": pa.list_(pa.int64())}
    schema = pa.schema([*types.items(), ("text", pa.string())])
    for epoch in range(epochs):
        it.batch(pa.RecordBatch.from_pylist(ROWS, schema), epoch)
        it.end_epoch(epoch)
    return hf_dataset(EpochBatches(it.reader, 5, **{"tail": "drop", **options}))


@pytest.mark.smoke
def test_rows_have_the_columns_types_and_a_look_at_the_first_takes_none() -> None:
    with Arrivals() as it:
        data = dataset(it)
        types = {name: str(feature) for name, feature in data.features.items()}
        assert types == {
            "id": "Value('int32')",
            "at": "Value('float32')",
            "tokens": "List(Value('int64'))",
            "text": "Value('string')",
        }
        for _ in range(3):
            assert next(iter(data)) == ROWS[0]
        assert it.reader.abandoned == 0
        assert list(data) == list(data.map(lambda row: row)) == ROWS


@pytest.mark.smoke
def test_wrong_use_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate: Any = import_module("accelerate")
    with Arrivals() as it:
        data = dataset(it)
        with pytest.raises(ConfigError, match=r"tail='short': must be 'drop'"):
            dataset(it, 0, tail="short")
        prepare = accelerate.Accelerator(cpu=True).prepare
        with pytest.raises(ConfigError, match="set num_workers=0"):
            prepare(loading.DataLoader(data, batch_size=5, num_workers=2))
        split = import_module("datasets.distributed").split_dataset_by_node(data, 0, 2)
        with pytest.raises(ConfigError, match="leave out shard"):
            prepare(loading.DataLoader(split, batch_size=5))
        reading = iter(data)
        next(reading)
        state = data.state_dict()
        del reading
        data.load_state_dict(state)
        with pytest.raises(ConfigError, match="Leave out load_state_dict"):
            next(iter(data))
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(FrameworkMissingError, match="pip install datasets"):
            dataset(it, 0)


def test_used_rows_are_known_within_an_epoch_only_where_batches_are_the_feeds() -> None:
    accelerate: Any = import_module("accelerate")
    known = {
        (5, "map"): [0, 1, 2],
        (3, "map"): [0, None, None, None, 2],
        (5, "pack"): [0, 2],
        (5, "filter"): [0, 2],
    }
    for (size, name), expected in known.items():
        with Arrivals(tracks=True) as it:
            data = dataset(it, 1)
            changed = {
                "map": data.map(lambda row: {"id": row["id"] + 1}).select_columns(["id"]),
                "pack": data.map(lambda rows: {"id": rows["id"][:4]}, batched=True,
                                 remove_columns=data.column_names),
                "filter": data.filter(lambda row: row["id"] < 4),
            }  # fmt: skip
            loader = accelerate.Accelerator(cpu=True).prepare(
                loading.DataLoader(changed[name], batch_size=size, collate_fn=list)
            )
            assert isinstance(loader.dataset, LoadedRows)
            batches = list(loader)
            assert [loader.dataset.used(n) for n in range(len(batches) + 1)] == expected
            ids = [row["id"] for batch in batches for row in batch]
            assert ids == (list(range(1, 11)) if name == "map" else list(range(4)))
