"""Batches for workers: who takes part in an epoch, who is too late, what ends it, what arrives."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from sparkdl.core.errors import FeedClosedError, FeedTypeError, SparkdlError
from sparkdl.datasets.torch import tensors_of
from sparkdl.datasets.torch_workers import BatchServer, Columns, Hello, Tensors, batches_from
from sparkdl.feed.reader.batches import EpochBatches
from tests.doubles.feeds import SOON_S, Arrivals, Running


def server(it: Arrivals) -> BatchServer:
    return BatchServer(EpochBatches(it.reader, 4), dict)


def begin(at: BatchServer, worker: int, number: int = 0, loader: int = 1) -> Iterator[list[int]]:
    """Begin an iteration, here instead of in a worker process."""
    for batch in batches_from(at.inherited, Hello(loader, 2, worker, number)):
        yield batch["x"].tolist()


def arrive(it: Arrivals, epochs: int = 1) -> None:
    """Let epochs of three batches arrive."""
    for epoch in range(epochs):
        it.rows(12, epoch=epoch)
        it.end_epoch(epoch)


def test_worker_that_comes_after_the_end_sees_the_end() -> None:
    with Arrivals() as it:
        arrive(it, epochs=2)
        at = server(it)
        assert len(list(begin(at, 0))) == 3
        assert list(begin(at, 1)) == []
        assert len(list(begin(at, 1, number=1))) == 3
        assert list(begin(at, 0, number=1)) == []
        assert it.consumed == (24, 2)


@pytest.mark.parametrize("again", [{"number": 1}, {"loader": 2}, {}])
def test_who_begins_again_takes_the_epoch_over(again: dict[str, int]) -> None:
    with Arrivals() as it:
        arrive(it)
        at = server(it)
        old = begin(at, 0)
        next(old)
        new = begin(at, 0, **again)
        assert next(new) == [0, 1, 2, 3]
        assert list(old) == []
        assert len(list(new)) == 2


def test_worker_that_still_reads_an_iteration_left_by_others_takes_nothing() -> None:
    with Arrivals() as it:
        arrive(it)
        at = server(it)
        next(begin(at, 0))
        new = begin(at, 0, number=1)
        next(new)
        assert list(begin(at, 1, number=0)) == []
        assert len(list(new)) == 2


def test_epoch_whose_worker_went_away_is_not_joined() -> None:
    with Arrivals() as it:
        arrive(it)
        at = server(it)
        old = begin(at, 0)
        next(old)
        del old
        for thread in threading.enumerate():
            if thread.name == "sparkdl-batches-worker":
                thread.join(SOON_S)
        assert next(begin(at, 1)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (FeedTypeError("column 'x'"), FeedTypeError, "(?m)^column 'x'$"),
        (KeyError("x"), SparkdlError, "(?m)^KeyError: 'x'$"),
    ],
)
def test_error_of_one_batch_ends_the_epoch_of_who_asked(
    error: Exception, kind: type[Exception], words: str
) -> None:
    def refuse(columns: Columns) -> Tensors:
        raise error

    with Arrivals() as it:
        arrive(it)
        at = BatchServer(EpochBatches(it.reader, 4), refuse)
        with pytest.raises(kind, match=words):
            list(begin(at, 0))


def test_server_that_is_forgotten_ends_who_waits() -> None:
    with Arrivals() as it:
        at = server(it)
        door = at.inherited.dup()
        waiting = Running(lambda: list(batches_from(door, Hello(1, 2, 0, 0))))
        it.waits.wait_for_waiter()
        del at
        with pytest.raises(FeedClosedError, match="closed this feed"):
            waiting.result()
        with pytest.raises(FeedClosedError, match="closed this feed"):
            list(batches_from(door, Hello(1, 2, 1, 0)))
        door.close()


@pytest.mark.parametrize("dtype", ["?", "i1", "<u2", "<i8", "<f2", "<f4", "<c16"])
@pytest.mark.parametrize("shape", [(3,), (3, 5), (0,), (2, 0, 4)])
def test_arrays_arrive_as_they_were_and_can_be_written(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    strings = ["ä", "", "z"]
    with Arrivals() as it:
        arrive(it)
        at = BatchServer(EpochBatches(it.reader, 4), lambda _: tensors_of({"a": array} | given))
        given = {"b": np.array(strings, object)}
        arrived = next(batches_from(at.inherited, Hello(1, 2, 0, 0)))
        assert arrived["b"] == strings
        assert arrived["a"].numpy().dtype == array.dtype
        np.testing.assert_array_equal(arrived["a"].numpy(), array)
        arrived["a"][...] = 0
