"""An `async` function's batches: many in flight, answers in order, failures, cancelled calls."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Generator, Iterator
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest

from sparkdl.core.errors import InferenceError
from sparkdl.ml.scoring import loaded
from sparkdl.ml.scoring.columns import OutputColumn
from sparkdl.ml.scoring.inputs import InputColumn
from sparkdl.ml.scoring.source import ANY, Tensor, source_of_content
from sparkdl.ml.scoring.task import MAX_ASYNC, Score
from tests.doubles.until import until

SEEN = SimpleNamespace()
Scoring = Callable[..., Generator[Any, None, None]]


@pytest.fixture
def scoring() -> Iterator[Scoring]:
    SEEN.running, SEEN.most, SEEN.rows = 0, 0, list[int]()

    def begun(
        fn: Any, rows: Any, size: int = 1, error_col: str | None = None, **how: Any
    ) -> Generator[Any, None, None]:
        made = cloudpickle.dumps((lambda: fn, ("y",)))
        inputs = (InputColumn("x", Tensor("x", ANY, None)),)
        outputs = (OutputColumn("y", "y", pa.int64(), "function"),)
        source = source_of_content(made, "function")
        how = {"handle_invalid": "error", "error_col": error_col} | how
        score = Score(source, "it", inputs, outputs, size, **how)
        given = [pa.array(range(rows), pa.int64())] if isinstance(rows, int) else rows
        arrays = score.structs(iter(given))
        return (row for array in arrays for row in array.to_pylist())

    yield begun
    loaded._loaded.clear()  # upon which the loop ends


async def meet(columns: dict[str, Any]) -> Any:
    """Wait until the window is full, answer the last call first, and refuse row 37."""
    seen, x = sys.modules[__name__].SEEN, columns["x"]
    seen.running += 1
    seen.most = max(seen.most, seen.running)
    seen.rows.append(len(x))
    try:
        while seen.most < MAX_ASYNC:
            await asyncio.sleep(0)
        for _ in range(100 - int(x[0])):
            await asyncio.sleep(0)
        if 37 in x:
            raise {True: asyncio.CancelledError, False: TimeoutError}[len(x) > 1]("late")
    finally:
        seen.running -= 1
    return 2 * x


def test_batches_are_in_flight_at_once_and_answers_have_the_rows_order(scoring: Scoring) -> None:
    assert [row["y"] for row in scoring(meet, 36)] == [2 * x for x in range(36)]
    assert (SEEN.most, SEEN.running) == (MAX_ASYNC, 0)


def test_batch_that_fails_is_halved_while_others_are_in_flight(scoring: Scoring) -> None:
    found = list(scoring(meet, 100, 4, "why"))
    assert [row["y"] for row in found] == [None if x == 37 else 2 * x for x in range(100)]
    assert {x: r["why"] for x, r in enumerate(found) if r["why"]} == {37: "TimeoutError: late"}
    assert sorted(SEEN.rows, reverse=True) == [*[4] * 25, *[2] * 2, *[1] * 2]
    assert (SEEN.most, SEEN.running) == (MAX_ASYNC, 0)


@pytest.mark.parametrize("size", [1, 4])
def test_failure_or_a_cancelled_call_names_its_rows(scoring: Scoring, size: int) -> None:
    reason = {1: "rows 37 to 37: TimeoutError", 4: "rows 36 to 39: CancelledError"}[size]
    with pytest.raises(InferenceError, match=reason):
        list(scoring(meet, 100, size))
    assert until(lambda: not SEEN.running), "the other calls are cancelled"


def test_task_that_ends_early_cancels_what_is_in_flight(scoring: Scoring) -> None:
    rows = scoring(meet, 100)
    assert next(rows)["y"] == 0
    rows.close()
    assert until(lambda: not SEEN.running)
    assert len(SEEN.rows) < 100


def test_function_that_only_returns_what_to_await_is_refused(scoring: Scoring) -> None:
    with pytest.raises(InferenceError, match="define it by `async def`"):
        list(scoring(lambda columns: meet(columns), 1))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_function_that_exits_fails_the_task_and_may_stop_the_loop(
    scoring: Scoring, kind: type[BaseException]
) -> None:
    async def exits(columns: dict[str, Any]) -> Any:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0)
        if columns["x"][0] == 2:
            await asyncio.create_task(fail())
        return columns["x"]

    async def fail() -> None:
        raise kind("over")

    with pytest.raises(InferenceError, match=f"it failed on rows 2 to 2: {kind.__name__}: over"):
        list(scoring(exits, 3))


def lengths(columns: dict[str, Any]) -> Any:
    """Note the lengths of a batch, and refuse the text `bad`."""
    sys.modules[__name__].SEEN.rows.append(sorted(map(len, columns["x"])))
    if "bad" in list(columns["x"]):
        raise ValueError("no")
    return [int(text[1:] or 0) for text in columns["x"]]


def test_rows_of_like_lengths_are_scored_together_and_answered_in_order(scoring: Scoring) -> None:
    # Windows of 16, 16, 16 and 2 rows.
    texts: list[Any] = [f"x{'0' * (i * 7 % 11)}{i}" for i in range(50)]

    def found(texts: list[Any], **how: Any) -> list[Any]:
        SEEN.rows.clear()
        given = [pa.array(each, pa.string()) for each in (texts[:21], texts[21:])]
        return list(scoring(lengths, given, 2, group_by=0, **how))

    assert [row["y"] for row in found(texts)] == list(range(50))
    assert len(SEEN.rows) == 25
    for start in (0, 8, 16):
        window = [n for batch in SEEN.rows[start : start + 8] for n in batch]
        assert window == sorted(map(len, texts[2 * start : 2 * start + 16]))
    texts[30] = "bad"
    with pytest.raises(InferenceError, match=r"it failed on rows (\d\d, 30|30, \d\d): ValueError"):
        found(texts)
    holes = [None if i == 40 else text for i, text in enumerate(texts)]
    rows = found(holes, error_col="why", handle_invalid="keep")
    assert [row and row["y"] for row in rows] == [None if i in (30, 40) else i for i in range(50)]
    assert rows[30]["why"] == "ValueError: no"
