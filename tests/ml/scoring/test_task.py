"""Arrow batches through a model, as Spark's task does it: batches, nulls, errors."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from sparkdl.core.errors import FeedTypeError, InferenceError
from sparkdl.ml.scoring.columns import OutputColumn
from sparkdl.ml.scoring.inputs import InputColumn
from sparkdl.ml.scoring.loaded import load
from sparkdl.ml.scoring.source import source_of
from sparkdl.ml.scoring.task import Score, ScoreBatches
from tests.ml.conftest import Saved

pytestmark = pytest.mark.tensorflow

FLOATS = pa.list_(pa.field("element", pa.float32()))


def score(path: str, handle_invalid: str = "error", batch_size: int = 4) -> Score:
    """Return what scores column "c" with all outputs of a model of one input."""
    source = source_of(path)
    signature = load(source).signature
    outputs = tuple(OutputColumn(t.name, t.name, FLOATS) for t in signature.outputs)
    inputs = (InputColumn("c", signature.inputs[0]),)
    return Score(source, "the model", inputs, outputs, batch_size, handle_invalid)


def scored(task: Score, *given: pa.Array) -> list[Any]:
    """Return what column "c" in these batches of Spark's becomes: a dict of the outputs a row."""
    return [row for array in task.structs(iter(given)) for row in array.to_pylist()]


def rows(*values: Any) -> pa.Array:
    return pa.array(values, pa.list_(pa.float32()))


def test_null_rows_are_refused_by_default(saved: Saved) -> None:
    given = rows([1, 2, 3], None, [1, None, 3])
    told = r"the model, rows 0 to 2: column 'c' holds nulls in 2 of 3 rows.*'keep'"
    with pytest.raises(FeedTypeError, match=told):
        scored(score(saved.keras), given)


@pytest.mark.parametrize("policy", ["keep", "skip"])
def test_batches_keep_their_columns_and_skip_what_they_must(saved: Saved, policy: str) -> None:
    batch = pa.RecordBatch.from_pydict(
        {"id": pa.array([1, 2, 3]), "c": rows([1, 2, 3], None, [4, 5, 6])}
    )
    task = ScoreBatches(score(saved.keras, policy), (1,), (0,))
    (found,) = task(iter([batch]))
    assert found.schema.names == ["id", "y"]
    assert found["id"].to_pylist() == ([1, 2, 3] if policy == "keep" else [1, 3])
    (structs,) = task.score.structs(iter([batch.column("c")]))
    assert [row is None for row in structs.to_pylist()] == [False, True, False]
    assert list(task(iter([batch.slice(0, 0)]))) == []


def test_output_that_is_not_one_value_a_row_is_refused(saved: Saved) -> None:
    source = source_of(saved.functions, "transpose")
    image = load(source).signature.inputs[0]
    outputs = (OutputColumn("all", "all", pa.float32()),)
    task = Score(source, "m.keras", (InputColumn("c", image),), outputs, 2, "error")
    wrong = r"m.keras failed on rows 0 to 1: .*output 'all' has shape \[\] for 2 rows"
    with pytest.raises(InferenceError, match=wrong):
        scored(task, rows([1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4]))
