"""A scorer and its tasks, without Spark: its owner is a process of the test's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import psutil
import pyarrow as pa
import pytest

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import InferenceError, ScorerLostError
from sparkdl.ml.scoring.client import ScorerClient, Start, _start
from sparkdl.ml.scoring.columns import OutputColumn
from sparkdl.ml.scoring.inputs import InputColumn
from sparkdl.ml.scoring.predictor import RowsFailedError
from sparkdl.ml.scoring.share import Share, Sharing
from sparkdl.ml.scoring.source import ANY, ModelSource, Tensor, source_of_content
from sparkdl.ml.scoring.task import Score

SIZE = 8
END_S = 30.0

Connect = Callable[..., ScorerClient]


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends when its standard input does."""
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()  # upon which its scorers end, or the leak police complains


@pytest.fixture
def connect(owner: subprocess.Popen[bytes]) -> Iterator[Connect]:
    with ExitStack() as stack:

        def joined(source: ModelSource, *outputs: OutputColumn) -> ScorerClient:
            found = ScorerClient.connect(source, "", 1, outputs, owner.pid)
            return stack.enter_context(closing(found))

        yield joined


def function(make: Any) -> ModelSource:
    return source_of_content(cloudpickle.dumps((make, ("y",))), "function")


def double() -> Any:
    """Make a function that refuses 13, and tells the size of its batches and its process."""

    def fn(columns: dict[str, Any]) -> dict[str, Any]:
        x = columns["x"]
        if 13 in x:
            raise ValueError("thirteen")
        return {"y": 2 * x, "size": np.full(len(x), len(x)), "pid": [os.getpid()] * len(x)}

    return fn


ALL = tuple(OutputColumn(n, n, pa.int64(), "function") for n in ("y", "size", "pid"))
Y = ALL[0]


def send(client: ScorerClient, *values: int) -> None:
    client.send({"x": np.array(values)}, {})


def answer(client: ScorerClient) -> list[list[Any]]:
    return [column.to_pylist() for column in client.receive()]


def wait_for_end(pid: int) -> None:
    try:
        psutil.Process(pid).wait(END_S)
    except psutil.NoSuchProcess:
        return


def test_only_the_task_with_the_wrong_rows_fails(connect: Connect) -> None:
    good, bad = connect(function(double), Y), connect(function(double), Y)
    send(good, 1, 2)
    send(bad, 11, 12, 13, 14, 15, 16)
    assert answer(good) == [[2, 4]]
    with pytest.raises(RowsFailedError, match="ValueError: thirteen"):
        bad.receive()
    send(good, *range(SIZE))
    assert answer(good) == [[2 * x for x in range(SIZE)]]
    again = connect(function(double), Y)
    assert again.pid == good.pid
    send(again, 3, 4)
    assert answer(again) == [[6, 8]]


def gated() -> Any:
    """Make `double`, whose first call waits for the rows of four other tasks."""
    fn, calls = double(), list[int]()

    def waits(columns: dict[str, Any]) -> dict[str, Any]:
        deadline = Deadline.after(END_S)
        while not calls and not deadline.has_passed:
            waiting = [frame.f_code.co_name for frame in sys._current_frames().values()]
            if waiting.count("do_exchange") == 5:
                break
            threading.Event().wait(0.02)
        calls.append(0)
        return dict(fn(columns))

    return waits


@pytest.mark.parametrize("bad", [4, 13])
def test_waiting_rows_of_all_tasks_are_one_batch_and_fail_alone(connect: Connect, bad: int) -> None:
    clients = [connect(function(gated), *ALL) for _ in range(5)]
    given = [[0, 1], [2, 3], [bad, 5], [6, 7], [8, 9]]
    for client, values in zip(clients, given, strict=True):
        client.send({"x": np.array(values)}, {}, 6)
    sizes = []
    for client, values in zip(clients, given, strict=True):
        if 13 in values:
            with pytest.raises(RowsFailedError, match="ValueError: thirteen"):
                client.receive()
        else:
            twice, size, pids = answer(client)
            assert twice == [2 * x for x in values]
            assert {*pids} == {clients[0].pid} != {os.getpid()}
            sizes += size[:1]
    # Three fill a batch, before or after those that came first, in whatever order they come.
    assert bad == 13 or sorted(sizes) in ([2, 2, 6, 6, 6], [4, 4, 6, 6, 6])


@pytest.mark.deep
def test_model_that_fails_for_one_task_after_another_is_loaded_anew(connect: Connect) -> None:
    pids: list[int] = []
    for _ in range(3):
        client = connect(function(double), Y)
        pids.append(client.pid)
        send(client, *[13] * SIZE)
        with pytest.raises(RowsFailedError):
            client.receive()
        client.close()
    assert pids[0] == pids[1] != pids[2]
    wait_for_end(pids[0])


def test_lost_scorer_is_an_error_with_its_last_words_and_is_replaced(connect: Connect) -> None:
    def dies() -> Any:
        def fn(columns: dict[str, Any]) -> Any:
            if columns["x"][0] == 0:
                sys.stderr.write("farewell\n")
                sys.stderr.flush()
                os.kill(os.getpid(), signal.SIGSEGV)
            return columns["x"]

        return fn

    first, second = connect(function(dies), Y), connect(function(dies), Y)
    send(first, *range(SIZE))
    for client in (second, first):
        with pytest.raises(ScorerLostError, match=rf"process {first.pid} .*\n  \| farewell\n"):
            if client is second:  # by then the scorer may have ended
                send(second, *range(SIZE))
            client.receive()
    with pytest.raises(ScorerLostError):
        send(second, 1)
        second.receive()
    wait_for_end(first.pid)
    third = connect(function(dies), Y)
    assert third.pid != first.pid
    send(third, *range(1, SIZE + 1))
    assert answer(third) == [list(range(1, SIZE + 1))]


def send_and_die(owner: int) -> None:
    """Be a task that is killed while the scorer has rows of it."""
    client = ScorerClient.connect(function(double), "", 1, (Y,), owner)
    send(client, 1)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.smoke
def test_task_that_is_killed_neither_harms_others_nor_keeps_the_scorer(
    connect: Connect, owner: subprocess.Popen[bytes]
) -> None:
    client = connect(function(double), Y)
    program = f"from {__name__} import send_and_die; send_and_die({owner.pid})"
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=END_S)
    assert done.returncode == -signal.SIGKILL
    send(client, *range(SIZE))
    assert answer(client) == [[2 * x for x in range(SIZE)]]
    client.close()
    owner.kill()
    owner.wait()  # upon which it ends with its last task
    wait_for_end(client.pid)
    assert not psutil.pid_exists(client.pid)


def test_model_that_cannot_be_loaded_says_why_at_once(connect: Connect, tmp_path: Path) -> None:
    tries = tmp_path / "tries"

    def fails() -> Any:
        with tries.open("a") as file:
            file.write("x")
        raise OSError("no such weights")

    client = connect(function(fails), Y)
    send(client, 1)
    with pytest.raises(InferenceError, match="cannot be loaded: OSError: no such weights"):
        client.receive()
    assert tries.read_text() == "x"


def test_scorer_that_cannot_start_says_why(owner: subprocess.Popen[bytes]) -> None:
    start = Start("n" * 200, function(double), (owner.pid,), 1, False)
    with pytest.raises(InferenceError, match=r"started, status 1: (.*\n)*OSError: .*too long"):
        _start(start, "", Deadline.after(END_S))


@pytest.mark.deep
def test_scorer_without_tasks_ends_for_another_model_a_busy_one_does_not(connect: Connect) -> None:
    first = connect(function(double), Y)
    send(first, *range(SIZE))
    answer(first)
    second = connect(function(lambda: lambda columns: 3 * columns["x"]), Y)
    send(second, *range(SIZE))
    assert answer(second) == [[3 * x for x in range(SIZE)]]
    send(first, *range(SIZE))
    assert answer(first) == [[2 * x for x in range(SIZE)]]
    first.close()
    second.close()
    third = connect(function(lambda: lambda columns: 5 * columns["x"]), Y)
    wait_for_end(first.pid)
    wait_for_end(second.pid)
    send(third, *range(SIZE))
    assert answer(third) == [[5 * x for x in range(SIZE)]]


def test_text_and_arrays_of_any_length_arrive_as_they_are(connect: Connect) -> None:
    def told() -> Any:
        return lambda columns: {
            "y": [
                f"{text} {array.dtype} {array.tolist()}"
                for text, array in zip(columns["text"], columns["ragged"], strict=True)
            ]
        }

    client = connect(function(told), OutputColumn("y", "y", pa.string(), "function"))
    given = {"text": pa.array(["a", "ß"]), "ragged": pa.array([[1.5], [2.0, 3.0]])}
    values = {"text": np.array(["a", "ß"], object), "ragged": np.empty(2, object)}
    client.send(values, given)
    assert answer(client) == [["a float64 [1.5]", "ß float64 [2.0, 3.0]"]]


def test_nulls_and_errors_are_those_of_a_model_of_ones_own(
    owner: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkdl.ml.scoring.share.task_share", lambda: Share(1))
    monkeypatch.setattr("sparkdl.ml.scoring.client.executor_jvm_pid", lambda: owner.pid)
    source = function(lambda: lambda columns: double()(columns)["y"])
    inputs = (InputColumn("x", Tensor("x", ANY, None)),)
    own = Score(source, "the model", inputs, (Y,), SIZE, "keep")
    shared = replace(own, sharing=Sharing("executor"))
    null: list[Any] = [None] * SIZE
    given = [[1, None, 3], [], null, [4, None, *range(6, 13)], null, [14]]
    columns = [pa.array(values, pa.int64()) for values in given]

    def found(score: Score, *extra: pa.Array) -> list[Any]:
        answers = score.structs(iter([*columns, *extra]))
        return [row for array in answers for row in array.to_pylist()]

    expected = [x and {"y": 2 * x} for values in given for x in values]
    assert found(shared) == found(own) == expected
    assert list(shared.structs(iter([]))) == [pa.array([], shared.struct_type)]
    text = r"(?m)^the model failed on rows 24 to 31: ValueError: thirteen$"
    for score in (own, shared):
        with pytest.raises(InferenceError, match=text):
            found(score, pa.array([0, None, 13]))
