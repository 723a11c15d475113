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
        fn: Any, rows: int, size: int = 1, error_col: str | None = None
    ) -> Generator[Any, None, None]:
        made = cloudpickle.dumps((lambda: fn, ("y",)))
        inputs = (InputColumn("x", Tensor("x", ANY, None)),)
        outputs = (OutputColumn("y", "y", pa.int64(), "function"),)
        source = source_of_content(made, "function")
        score = Score(source, "it", inputs, outputs, size, "error", error_col=error_col)
        arrays = score.structs(iter([pa.array(range(rows), pa.int64())]))
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


def test_batches_are_in_flight_at_once_and_answers_have_the_order_of_the_rows(
    scoring: Scoring,
) -> None:
    assert [row["y"] for row in scoring(meet, 36)] == [2 * x for x in range(36)]
    assert (SEEN.most, SEEN.running) == (MAX_ASYNC, 0)


def test_batch_that_fails_is_halved_while_others_are_in_flight(scoring: Scoring) -> None:
    found = list(scoring(meet, 100, 4, "why"))
    assert [row["y"] for row in found] == [None if x == 37 else 2 * x for x in range(100)]
    assert {x: row["why"] for x, row in enumerate(found) if row["why"]} == {
        37: "TimeoutError: late"
    }
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
