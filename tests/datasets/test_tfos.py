"""TensorFlowOnSpark's `DataFeed`: its batches, its end, its results."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st
from pyspark.sql import Row

from sparkdl.control.channel import Local, Results, Terminated
from sparkdl.core.errors import InferenceError
from sparkdl.datasets.tfos import DataFeed
from sparkdl.feed.reader.batches import EpochBatches
from sparkdl.feed.transfer.infer_task import decode_results
from sparkdl.values.rows import encode_rows
from tests.doubles.feeds import FEED, Arrivals


class Answers:
    """What `batch_results` has sent, by partition."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, list[Any]]] = []

    def __call__(self, message: Local, fd: int) -> None:
        assert isinstance(message, Results)
        with open(fd, "rb", closefd=False) as file:
            file.seek(0)
            rows = decode_results(file.read())
        assert len(rows) == message.rows
        self.sent.append((message.exchange, rows))

    def of(self, exchange: str) -> list[Any]:
        return [row for name, rows in self.sent if name == exchange for row in rows]


def train(it: Arrivals, **options: Any) -> DataFeed:
    return DataFeed(it.reader, Answers(), **options)


def inference(it: Arrivals) -> tuple[DataFeed, Answers]:
    answers = Answers()
    return DataFeed(it.reader, answers, train_mode=False), answers


def partition(it: Arrivals, name: str, *segments: list[Any]) -> None:
    """Let one inference partition arrive."""
    last = None
    for rows in segments:
        for last in encode_rows(rows):
            it.batch(last, exchange=name)
    if last is not None:
        it.batch(last.slice(0, 0), exchange=name, is_last=True)


def rows(it: Arrivals, *segments: list[Any], epoch: int = 0) -> None:
    for segment in segments:
        for batch in encode_rows(segment):
            it.batch(batch, epoch)


def test_batches_run_across_partitions_and_epochs() -> None:
    with Arrivals() as it:
        feed = train(it)
        rows(it, [1, 2, 3], [4])
        it.end_epoch(0)
        rows(it, [5, 6, 7], epoch=1)
        it.end_epoch(1)
        it.end()
        assert [feed.next_batch(4), feed.next_batch(2)] == [[1, 2, 3, 4], [5, 6]]
        assert not feed.should_stop()
        assert it.consumed == (6, 1)
        assert feed.next_batch(4) == [7]
        assert feed.should_stop()
        assert feed.done_feeding
        assert feed.next_batch(4) == []
        assert it.consumed == (7, 2)


def test_second_feed_of_one_name_goes_on_where_the_first_was() -> None:
    with Arrivals() as it:
        rows(it, [1, 2, 3], [4, 5])
        assert train(it).next_batch(2) == [1, 2]
        assert train(it).next_batch(2) == [3, 4]
        it.end()
        assert train(it).next_batch(9) == [5]


def test_partitions_of_inference_do_not_end_a_batch_in_train_mode() -> None:
    with Arrivals() as it:
        feed = train(it)
        partition(it, "0.a", [1, 2])
        partition(it, "1.b", [3])
        it.end()
        assert feed.next_batch(5) == [1, 2, 3]


def test_whoever_claims_the_feed_later_ends_this_one() -> None:
    with Arrivals() as it:
        feed = train(it)
        rows(it, [1])
        iter(EpochBatches(it.reader, 1))
        train(it)
        assert feed.next_batch(1) == []
        assert feed.should_stop()


MAPPING = {"b": "tensor_b", "a": "tensor_a"}


@pytest.mark.parametrize(
    "fed",
    [
        [Row(b=10, a=1, c=0), Row(b=20, a=2, c=0)],
        [{"c": 0, "b": 10, "a": 1}, {"c": 0, "b": 20, "a": 2}],
        [(1, 10), (2, 20)],
        [[1, 10], [2, 20]],
    ],
    ids=["Row by name", "dict by name", "tuple by sorted column", "list by sorted column"],
)
def test_input_mapping_gives_lists_by_tensor_in_the_order_of_sorted_columns(fed: list[Any]) -> None:
    with Arrivals() as it:
        feed = train(it, input_mapping=MAPPING)
        assert feed.input_tensors == ["tensor_a", "tensor_b"]
        rows(it, fed)
        it.end()
        batch = feed.next_batch(2)
        assert isinstance(batch, dict)
        assert list(batch.items()) == [("tensor_a", [1, 2]), ("tensor_b", [10, 20])]


def test_batch_never_holds_rows_of_two_partitions_that_come_at_once() -> None:
    with Arrivals() as it:
        feed, answers = inference(it)
        for name, value in (("0.a", 1), ("1.b", 2), ("0.a", 3), ("0.a", 4), ("1.b", 5)):
            (batch,) = encode_rows([value])
            it.batch(batch, exchange=name)
        for name in ("0.a", "1.b"):
            it.batch(batch.slice(0, 0), exchange=name, is_last=True)
        it.end()
        found = []
        while got := feed.next_batch(10):
            found.append(got)
            feed.batch_results([-value for value in got])
        assert found == [[1], [2], [3, 4], [5]]
        assert answers.of("0.a") == [-1, -3, -4]
        assert answers.of("1.b") == [-2, -5]


def test_rows_that_were_not_answered_are_an_error_and_never_a_shift() -> None:
    with Arrivals() as it:
        feed, answers = inference(it)
        partition(it, "0.a", [1, 2])
        partition(it, "1.b", [3, 4])
        feed.next_batch(2)
        with pytest.raises(InferenceError, match="2 rows of one partition have no result"):
            feed.next_batch(2)
        assert answers.of("1.b") == []


def test_more_results_than_rows_are_an_error() -> None:
    with Arrivals() as it:
        feed, answers = inference(it)
        partition(it, "0.a", [1, 2])
        feed.next_batch(2)
        with pytest.raises(InferenceError, match="3 results for 2 unanswered rows"):
            feed.batch_results([10, 20, 30])
        assert answers.of("0.a") == [10, 20]
        feed.batch_results([])


@given(
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), max_size=4),
    st.integers(1, 7),
    st.integers(1, 7),
)
def test_each_row_gets_its_result(
    partitions: list[list[int]], batch_size: int, answer_size: int
) -> None:
    with Arrivals() as it:
        feed, answers = inference(it)
        row = 0
        asked: dict[str, list[int]] = {}
        for number, segments in enumerate(partitions):
            start = row
            pieces = []
            for count in segments:
                pieces.append(list(range(row, row + count)))
                row += count
            partition(it, f"{number}.x", *pieces)
            asked[f"{number}.x"] = list(range(start, row))
        it.end()
        owed: list[int] = []
        while batch := feed.next_batch(batch_size):
            assert any(set(batch) <= set(rows) for rows in asked.values())
            owed += batch
            is_end = any(batch[-1] == rows[-1] for rows in asked.values())
            while len(owed) >= answer_size or (is_end and owed):
                feed.batch_results(owed[:answer_size])
                del owed[:answer_size]
        feed.batch_results(owed)
        assert {name: answers.of(name) for name in asked} == asked


def test_terminate_drops_what_is_here_and_tells_the_agent() -> None:
    with Arrivals() as it:
        feed = train(it)
        rows(it, [1, 2, 3], [4])
        assert feed.next_batch(1) == [1]
        feed.terminate()
        assert it.sent[-1] == Terminated(FEED)
        assert not feed.should_stop()
        assert feed.next_batch(1) == []
        assert feed.should_stop()
        rows(it, [5])
        assert feed.next_batch(1) == []
