"""A feed as a dataset of PyTorch: tensors of one's own, each batch to one worker of a loader."""

from __future__ import annotations

import copy
import os
import re
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.core.errors import ConfigError, FeedTypeError, FrameworkMissingError, UnfedError
from sparkdl.datasets.torch import _loader_of_rows, let_accelerate_keep_batches, torch_dataset
from sparkdl.feed.reader.batches import EpochBatches
from tests.doubles.feeds import Arrivals, labelled, vectors
from tests.doubles.lazy import Lazy, needs

torch: Any = Lazy("torch")
pytestmark = [
    pytest.mark.torch,
    # Whoever forks a process with threads is warned, by Python 3.12 and by JAX.
    pytest.mark.filterwarnings("ignore:.*fork.*"),
]


def dataset(it: Arrivals, x: Any = None, y: Any = None, batch_size: int = 4) -> Any:
    names = [n for part in (x, y) for n in ([part] if isinstance(part, str) else part or [])]
    return torch_dataset(EpochBatches(it.reader, batch_size, tuple(names) or None), x, y)


def loader(it: Arrivals, workers: int = 2, **options: Any) -> Any:
    return torch.utils.data.DataLoader(
        dataset(it, "y"),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
        **options,
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant)")
def test_sparse_vectors_stay_sparse_in_workers_too(workers: int) -> None:
    with Arrivals() as it:
        it.batch(vectors(0, 9, 4))
        it.end_epoch(0)
        data = torch_dataset(EpochBatches(it.reader, 4, sparse=("x",)), "x", "y")
        found = [
            (x.layout, (x @ torch.eye(4, dtype=x.dtype)).tolist(), y.tolist())
            for x, y in torch.utils.data.DataLoader(data, batch_size=None, num_workers=workers)
        ]
    assert {layout for layout, *_ in found} == {torch.sparse_csr}
    assert [row for _, x, _ in found for row in x] == [[row, 0, 0, 1] for row in range(9)]
    assert [row for *_, y in found for row in y] == list(range(9))


def feed(it: Arrivals, epochs: int, count: int) -> None:
    """Let `epochs` arrive of `count` rows each, that go on counting, in segments of ten."""
    for epoch in range(epochs):
        for start in range(epoch * count, (epoch + 1) * count, 10):
            it.batch(labelled(start, min(start + 10, (epoch + 1) * count)), epoch)
        it.end_epoch(epoch)


def values(batches: Any) -> list[int]:
    return sorted(v for batch in batches for v in batch.tolist())


def error_of(batches: Any) -> Exception:
    """Return what reading all batches raises.

    A traceback would hold the loader's iterator in a circle of references, and then PyTorch waits
    five seconds for each worker.
    """
    try:
        try:
            list(batches)
        except Exception as error:  # noqa: BLE001 (looked at by the test)
            traceback.clear_frames(error.__traceback__)
            return error.with_traceback(None)
    except RuntimeError as late:
        # PyTorch raises in its handler of SIGCHLD, so wherever the loop is when the kernel tells of
        # the worker's end: even while the error of the broken connection is looked at.
        for each in (late.__context__, late):
            traceback.clear_frames(each.__traceback__ if each else None)
        late.__context__ = None
        return late.with_traceback(None)
    raise AssertionError("nothing was raised")


def test_elements_are_tensors_or_lists_of_strings() -> None:
    with Arrivals() as it:
        it.batch(labelled(0, 2))
        it.end_epoch(0)
        (batch,) = dataset(it)
        assert batch["x"].dtype == torch.float32
        assert batch["x"].tolist() == [[0, 0], [1, 1]]
        assert batch["y"].dtype == torch.int64
        assert batch["s"] == ["name 0", "name 1"]


def test_weights_of_padded_rows_come_last() -> None:
    weights = np.array([1, 1, 0], np.float32)
    batch = {"x": np.zeros(3), "y": np.ones(3), "sample_weight": weights}
    data: Any = [batch]  # as far as a process reads its own feed, any iterable will do
    x, y, weight = next(iter(torch_dataset(data, "x", "y")))
    assert (x.tolist(), y.tolist(), weight.tolist()) == ([0, 0, 0], [1, 1, 1], [1, 1, 0])
    x, weight = next(iter(torch_dataset(data, "x")))
    assert weight.tolist() == [1, 1, 0]
    assert len(next(iter(torch_dataset(data, ["x", "sample_weight"], "y")))) == 2
    assert set(next(iter(torch_dataset(data)))) == set(batch)


@pytest.mark.parametrize("workers", [0, 1])
def test_writing_to_a_tensor_changes_nothing_but_itself(workers: int) -> None:
    with Arrivals() as it, warnings.catch_warnings():
        feed(it, epochs=1, count=10)
        first = next(iter(loader(it, workers)))
        first += 100
        assert first.tolist() == [100, 101, 102, 103]
        assert values(loader(it, workers)) == list(range(10))


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (pa.array([[1], [1, 2]]), "'c' holds arrays of different lengths"),
        (pa.array([["a"], ["b"]]), "'c' holds arrays of text"),
        (pa.array([["a"], ["b", "c"]]), "'c' holds arrays of text"),
    ],
)
def test_column_that_is_no_tensor_is_refused_by_name(column: pa.Array, words: str) -> None:
    with Arrivals() as it:
        it.batch(pa.record_batch({"c": column}))
        it.end_epoch(0)
        with pytest.raises(FeedTypeError, match=words):
            list(dataset(it))


@pytest.mark.parametrize("workers", [0, 1])
def test_times_structs_and_padded_arrays_are_tensors(workers: int) -> None:
    batch = pa.record_batch(
        {
            "at": pa.array([1_000_001, 2], pa.timestamp("us", "UTC")),
            "ids": pa.array([[1], [2, 3]], pa.list_(pa.int32())),
            "c": [{"a": 1, "b": True}, {"a": 3, "b": False}],
        }
    )
    with Arrivals() as it:
        it.batch(batch)
        it.end_epoch(0)
        batches = EpochBatches(it.reader, 2, ("ids", "c", "ids.mask", "at"), pad={"ids": None})
        data = torch_dataset(batches, ["ids", "ids.mask", "c"], "at")
        context = {"multiprocessing_context": "fork"} if workers else {}
        ((x, y),) = torch.utils.data.DataLoader(data, None, num_workers=workers, **context)
    assert {name: value.tolist() for name, value in x.items()} == {
        "ids": [[1, 0], [2, 3]],
        "ids.mask": [[True, False], [True, True]],
        "c.a": [1, 3],
        "c.b": [True, False],
    }
    assert (x["ids"].dtype, y.dtype, y.tolist()) == (torch.int32, torch.int64, [1_000_001, 2])


@pytest.mark.parametrize("is_persistent", [False, True])
def test_workers_share_each_epoch_and_end_with_it(is_persistent: bool) -> None:
    with Arrivals() as it:
        feed(it, epochs=3, count=50)
        data = loader(it, persistent_workers=is_persistent)
        for epoch in range(3):
            assert values(data) == list(range(epoch * 50, epoch * 50 + 50))
        assert it.consumed == (150, 3)
        it.end()
        assert values(data) == []


@pytest.mark.parametrize("is_persistent", [False, True])
def test_loop_that_is_left_gives_its_rows_back(is_persistent: bool) -> None:
    with Arrivals() as it:
        feed(it, epochs=2, count=100)
        data = loader(it, persistent_workers=is_persistent)
        for _ in range(2):
            torch.manual_seed(0)  # the same seed is no sign of the same iteration
            for _batch in data:
                break
        torch.manual_seed(0)
        assert values(data) == list(range(100))
        assert values(data) == list(range(100, 200))


def die_at_8(batch: Any) -> Any:
    if 8 in batch.tolist():
        os.kill(os.getpid(), signal.SIGKILL)
    return batch.numpy()  # a tensor's descriptor would be lost where the handler of SIGCHLD raises


@pytest.fixture
def torn_files() -> Iterator[None]:
    """Close temporary files that PyTorch has left open.

    Its handler of SIGCHLD raises wherever the loader stands, also between the opening of a file, by
    which it asks whether there are descriptors left, and what would close that. One that is torn
    earlier still has the folder's name yet, and is closed by Python, with a warning.
    """
    own = os.path.join(tempfile.gettempdir(), "tmp")
    before = set(os.listdir("/dev/fd"))
    yield
    for fd in set(os.listdir("/dev/fd")) - before:
        with suppress(OSError):
            if os.readlink(f"/dev/fd/{fd}").startswith(own):
                os.close(int(fd))


# PyTorch's handler of SIGCHLD raises wherever the thread is: in the loader's __del__, too.
@pytest.mark.filterwarnings("ignore:.*_MultiProcessingDataLoaderIter.__del__")
@pytest.mark.filterwarnings(
    r"ignore:Exception ignored in. <_io.FileIO name='\S+/sdl-\w+' mode='rb\+'"
)
@pytest.mark.usefixtures("torn_files")
def test_worker_that_dies_is_an_error_and_the_feed_can_be_read_again() -> None:
    with Arrivals() as it:
        feed(it, epochs=1, count=100)
        # One batch each: PyTorch keeps descriptors of those that a dead worker has not asked for.
        error = error_of(loader(it, collate_fn=die_at_8, prefetch_factor=1))
        assert isinstance(error, RuntimeError)
        assert re.search("exited unexpectedly|killed by signal", str(error))
        del error  # its traceback holds the loader
        assert values(loader(it)) == list(range(100))


def test_feed_that_brings_nothing_fails_in_the_training_loop() -> None:
    with Arrivals(timeout_s=0.1) as it, pytest.raises(UnfedError, match="received no data"):
        raise error_of(loader(it))


def test_dataset_is_read_in_the_nodes_process_alone() -> None:
    with Arrivals() as it:
        data = copy.copy(dataset(it))  # by pickling, as for a worker
        with pytest.raises(ConfigError, match="only in the node's process"):
            iter(data)
        data = dataset(it)
        data._pid += 1  # as if forked
        with pytest.raises(ConfigError, match="this dataset itself"):
            iter(data)


def test_accelerate_that_takes_loaders_in_another_way_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = SimpleNamespace(prepare_data_loader=lambda loader: loader)
    monkeypatch.setitem(sys.modules, "accelerate", SimpleNamespace(accelerator=here))
    monkeypatch.setitem(sys.modules, "accelerate.accelerator", here)
    with pytest.raises(FrameworkMissingError, match=r"a second time: .*Install Accelerate 1\.15"):
        let_accelerate_keep_batches()


def test_loader_of_a_trainer_has_to_have_batches_of_the_feeds_size_and_columns_by_name() -> None:
    with Arrivals() as it:
        with pytest.raises(ConfigError, match=r"batch_size=3: must be .* per_device_train_batch"):
            _loader_of_rows(dataset(it), SimpleNamespace(batch_size=3))
        with pytest.raises(ConfigError, match="without x and y, and without tail='pad'"):
            _loader_of_rows(dataset(it, "y"), SimpleNamespace(batch_size=3))


def resumed(it: Arrivals, is_resumed: bool) -> Any:
    """A dataset of four batches, whose loaders were three batches on before a restart."""
    feed(it, 1, 40)
    return torch_dataset(EpochBatches(it.reader, 10), "y", is_resumed=is_resumed)


@needs("accelerate")
@pytest.mark.parametrize("is_prepared", [False, True])
def test_skipped_batches_are_those_that_the_feed_has_left_out(is_prepared: bool) -> None:
    accelerate: Any = import_module("accelerate")  # before the dataset is made
    for is_resumed in (True, False):
        with Arrivals() as it:
            loader: Any = torch.utils.data.DataLoader(resumed(it, is_resumed), batch_size=None)
            if is_prepared:
                loader = accelerate.Accelerator(cpu=True).prepare(loader)
            found = values(accelerate.skip_first_batches(loader, 3))
            assert found == list(range(0 if is_resumed else 30, 40))


def test_state_of_a_loader_is_that_of_ctx_checkpoint() -> None:
    with Arrivals() as it:
        data = resumed(it, True)
        data.load_state_dict(data.state_dict())
        assert values(data) == list(range(40))
        with pytest.raises(ConfigError, match=r"resumes only from ctx\.checkpoint"):
            resumed(it, False).load_state_dict({})
