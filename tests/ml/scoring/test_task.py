"""Arrow batches through a model, as Spark's task does it: batches, nulls, errors."""

from __future__ import annotations

import threading
from collections.abc import Generator
from itertools import pairwise
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest

from sparkdl.core.errors import FeedTypeError, InferenceError
from sparkdl.ml.scoring.columns import OutputColumn
from sparkdl.ml.scoring.held import load
from sparkdl.ml.scoring.inputs import InputColumn
from sparkdl.ml.scoring.rows import Rows, ahead, chunks
from sparkdl.ml.scoring.source import ANY, Tensor, source_of, source_of_content
from sparkdl.ml.scoring.task import Score, ScoreBatches, ScoreStructs
from tests.ml.conftest import Saved

pytestmark = pytest.mark.tensorflow

FLOATS = pa.list_(pa.field("element", pa.float32()))
X = np.arange(30, dtype=np.float32).reshape(10, 3)


def score(path: str, handle_invalid: str = "error", batch_size: int = 4) -> Score:
    """Return what scores column "c" with all outputs of a model of one input."""
    source = source_of(path)
    signature = load(source).signature
    outputs = tuple(OutputColumn(t.name, t.name, FLOATS) for t in signature.outputs)
    return Score(
        source,
        "the model",
        (InputColumn("c", signature.inputs[0]),),
        outputs,
        batch_size,
        handle_invalid,
    )


def scored(task: Score, *given: pa.Array) -> list[Any]:
    """Return what column "c" in these batches of Spark's becomes: a dict of the outputs a row."""
    return [row for array in ScoreStructs(task).structs(iter(given)) for row in array.to_pylist()]


def rows(*values: Any) -> pa.Array:
    return pa.array(values, pa.list_(pa.float32()))


def test_batches_are_full_wherever_sparks_end() -> None:
    pieces = [
        Rows((pa.array(np.arange(start, stop)),), ((file, np.arange(start, stop)),))
        for file, start, stop in (("a", 0, 5), ("a", 5, 6), ("b", 6, 20), ("b", 20, 20))
    ]
    found = list(chunks(iter(pieces), 8))
    assert [batch.columns[0].to_pylist() for batch in found] == [
        list(range(8)),
        list(range(8, 16)),
        list(range(16, 20)),
    ]
    assert list(map(str, found)) == [
        "rows 0 to 5 of a, rows 6 to 7 of b",
        *(f"rows {start} to {stop} of b" for start, stop in ((8, 15), (16, 19))),
    ]


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
    (structs,) = ScoreStructs(task.score).structs(iter([batch.column("c")]))
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


def test_a_thread_is_two_ahead_and_ends_with_who_reads() -> None:
    made = []
    is_made = threading.Semaphore(0)

    def source() -> Generator[int, None, None]:
        try:
            for number in range(10):
                made.append(number)
                is_made.release()
                yield number
        finally:
            made.append(-1)

    reader = ahead(source())
    assert next(reader) == 0
    for _ in range(3):
        assert is_made.acquire(timeout=30)
    assert next(reader) == 1
    reader.close()
    assert made in ([0, 1, 2, -1], [0, 1, 2, 3, -1])


def test_what_a_thread_meets_is_raised_where_it_is_read() -> None:
    def source() -> Generator[int, None, None]:
        yield 1
        raise FeedTypeError("no number")

    reader = ahead(source())
    assert next(reader) == 1
    with pytest.raises(FeedTypeError, match="no number"):
        next(reader)


def function_of_texts(batch_size: int, handle_invalid: str = "keep") -> Score:
    """Return what scores texts "c" by a function: their length, and the number of the call."""

    def make() -> Any:
        calls: list[int] = []

        def lengths(columns: dict[str, Any]) -> dict[str, Any]:
            if "bad" in columns["c"]:
                raise ValueError("no such token")
            calls.append(len(columns["c"]))
            assert max(calls) <= batch_size
            return {
                "n": np.array([len(text) for text in columns["c"]]),
                "call": np.full(len(columns["c"]), len(calls)),
            }

        return lengths

    source = source_of_content(cloudpickle.dumps((make, ("n", "call"))), "function")
    outputs = tuple(OutputColumn(name, name, pa.int64(), "function") for name in ("n", "call"))
    inputs = (InputColumn("c", Tensor("c", ANY, None)),)
    return Score(source, "the function", inputs, outputs, batch_size, handle_invalid)


def test_texts_of_like_length_share_a_batch_and_answers_are_in_the_rows_order() -> None:
    texts = [None if n % 10 == 9 else "x" * (n * 37 % 100) for n in range(100)]
    found = scored(function_of_texts(8), pa.array(texts[:30]), pa.array(texts[30:]))
    assert [row and row["n"] for row in found] == [t if t is None else len(t) for t in texts]
    by_call: dict[int, list[int]] = {}
    for row in filter(None, found):
        by_call.setdefault(row["call"], []).append(row["n"])
    ranges = [(min(lengths), max(lengths)) for _, lengths in sorted(by_call.items())]
    assert all(after[1] <= before[0] for before, after in pairwise(ranges)), "longest first"
    assert [len(lengths) for _, lengths in sorted(by_call.items())] == [8] * 11 + [2]


def test_error_on_sorted_texts_says_among_which_rows() -> None:
    texts = pa.array(["a" * n for n in range(20, 0, -1)] + ["bad", "b" * 30])
    with pytest.raises(InferenceError, match=r"failed on 4 of rows \d+ to 20: .*no such token"):
        scored(function_of_texts(4), texts)
