"""Arrow batches through a model, as Spark's task does it: batches, nulls, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.core.errors import FeedTypeError, InferenceError
from sparkdl.ml.estimators.source import source_of
from sparkdl.ml.scoring.columns import InputColumn, OutputColumn
from sparkdl.ml.scoring.predict import load
from sparkdl.ml.scoring.task import Score, ScoreBatches, ScoreStructs
from tests.ml.conftest import Saved
from tests.ml.models import linear

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore:__array__ implementation"),  # Keras' about numpy
]

FLOATS = pa.list_(pa.field("element", pa.float32()))
X = np.arange(30, dtype=np.float32).reshape(10, 3)


def score(path: str, handle_invalid: str = "error", batch_size: int = 4) -> Score:
    """Return what scores column "c" with all outputs of a model of one input."""
    source = source_of(path)
    signature = load(source).signature
    outputs = tuple(OutputColumn(t.name, t.name, FLOATS) for t in signature.outputs)
    return Score(
        source, (InputColumn("c", signature.inputs[0]),), outputs, batch_size, handle_invalid
    )


def rows(*values: Any) -> pa.Array:
    return pa.array(values, pa.list_(pa.float32()))


@pytest.mark.parametrize("batch_size", [1, 4, 10, 100])
def test_results_do_not_depend_on_the_batch_size(saved: Saved, batch_size: int) -> None:
    (found,), valid = score(saved.keras, batch_size=batch_size).columns([rows(*X.tolist())])
    assert valid is None
    assert np.allclose(found.to_pylist(), linear(X))


def test_null_rows_are_refused_by_default(saved: Saved) -> None:
    given = rows([1, 2, 3], None, [1, None, 3])
    with pytest.raises(FeedTypeError, match=r"column 'c' holds nulls in 2 of 3 rows.*'keep'"):
        score(saved.keras).columns([given])


@pytest.mark.parametrize("given", [rows(None, [1, 2, 3], [1, None, 3], [4, 5, 6]), rows(None)])
def test_null_rows_have_null_outputs_and_do_not_shift_the_others(
    saved: Saved, given: pa.Array
) -> None:
    (found,), valid = score(saved.keras, "keep").columns([given])
    expected = [
        None if row is None or None in row else linear([row])[0].tolist()
        for row in given.to_pylist()
    ]
    assert found.to_pylist() == expected
    assert valid is not None
    assert valid.tolist() == [row is not None for row in expected]


@pytest.mark.parametrize("policy", ["keep", "skip"])
def test_batches_keep_their_columns_and_skip_what_they_must(saved: Saved, policy: str) -> None:
    batch = pa.RecordBatch.from_pydict(
        {"id": pa.array([1, 2, 3]), "c": rows([1, 2, 3], None, [4, 5, 6])}
    )
    task = ScoreBatches(score(saved.keras, policy), (1,), (0,))
    (found,) = task(iter([batch]))
    assert found.schema.names == ["id", "y"]
    assert found["id"].to_pylist() == ([1, 2, 3] if policy == "keep" else [1, 3])
    (structs,) = ScoreStructs(task.score).structs(iter([batch.column("c")]))
    assert [row is None for row in structs.to_pylist()] == [False, True, False]


def test_empty_batches_pass(saved: Saved) -> None:
    def nothing() -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"c": rows()})

    (found,) = ScoreBatches(score(saved.keras), (0,), (0,))(nothing())
    assert found.num_rows == 0
    assert found.schema.names == ["c", "y"]


def test_output_that_is_not_one_value_a_row_is_refused(saved: Saved) -> None:
    source = source_of(saved.functions, "transpose")
    image = load(source).signature.inputs[0]
    outputs = (OutputColumn("all", "all", pa.float32()),)
    task = Score(source, (InputColumn("c", image),), outputs, 10, "error")
    with pytest.raises(InferenceError, match=r"output 'all' has shape \[\] for 2 rows"):
        task.columns([rows([1, 2, 3, 4], [5, 6, 7, 8])])
