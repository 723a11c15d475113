"""What the contestants of `job.py` do alike: phases, the network, arrays from files, scores.

The network is a small convolutional one for images of 28 x 28 numbers, by Adam.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from harness import NODES, claim_stdout, mark, session, wait_for_marks, write
from processes import MARK, marked, own_cpu_s

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PHASES = ("Spark", "launch", "first batch", "epochs", "save", "score", "shutdown")
SIDE = 28
CLASSES = 10
LEARNING_RATE = 1e-3
_MEMORY_MIB = 2048
_LOOK_S = 1.0

Array = np.ndarray[Any, Any]


class Phases:
    """Adds up the seconds of each phase, one after another, from now on."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._last = time.time()

    def end(self, phase: str, at: float | None = None) -> None:
        """Say that a phase has ended, now or at a time."""
        now = time.time() if at is None else at
        self.seconds[phase] += now - self._last
        self._last = now


class Told:
    """Times that nodes have told of: folders of marks, one for each event."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        for event in ("entered", "first", "trained"):
            Path(folder, event).mkdir(exist_ok=True)

    def mark(self, event: str) -> None:
        """On a node: tell that this has happened."""
        mark(str(Path(self.folder, event)))

    def end(self, phases: Phases, deadline_s: float, nodes: int = NODES) -> None:
        """On the driver: end the phases by what the last node has told of each."""
        names = {"entered": "launch", "first": "first batch", "trained": "epochs"}
        for event, phase in names.items():
            phases.end(phase, wait_for_marks(str(Path(self.folder, event)), deadline_s, nodes)[-1])


def options(description: str | None) -> argparse.ArgumentParser:
    """Return the parser with the options that every contestant of `job.py` has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--train", required=True, help="folder of Parquet files")
    parser.add_argument("--test", required=True, help="folder of Parquet files")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64, help="rows of a node in a step")
    parser.add_argument("--framework", choices=["keras", "torch"], default="keras")
    parser.add_argument("--deadline-s", type=float, default=1800)
    return parser


Job = Callable[[argparse.Namespace, Phases, Told], float]
"""Trains, saves and scores; returns the share of test rows that are right."""


def compete(parsed: argparse.Namespace, job: Job) -> None:
    """Do the job, and write a line of what it took."""
    phases, lines = Phases(), claim_stdout()
    with tempfile.TemporaryDirectory(prefix="bench-job-") as folder, _Usage() as usage:
        parsed.model = str(Path(folder, "model"))
        accuracy = job(parsed, phases, Told(folder))
        phases.end("shutdown")
    took = {"seconds": phases.seconds, "cpu_s": usage.cpu_s, "memory": usage.memory}
    write(lines, {"event": "job", "accuracy": accuracy, **took})


@contextmanager
def spark_session(phases: Phases, slots: int) -> Iterator[SparkSession]:
    """Start the session that all contestants on Spark have, and stop it."""
    settings = {"spark.sql.execution.arrow.pyspark.enabled": "true"}
    with session("bench-job", slots, settings, memory_mib=_MEMORY_MIB) as spark:
        phases.end("Spark")
        yield spark


class _Usage:
    """Looks every second at what all processes of this contestant use.

    Attributes:
        memory: The most bytes of all processes together.
    """

    def __init__(self) -> None:
        self.memory = 0
        self._cpu_s: dict[str, float] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Usage:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all processes, of each as it was last seen."""
        return sum(self._cpu_s.values())

    def _watch(self) -> None:
        token, is_over = os.environ.get(MARK, ""), False
        while not is_over:
            is_over = self._is_over.wait(_LOOK_S)
            there = marked(token)
            self._cpu_s.update(own_cpu_s(there))
            self.memory = max(self.memory, sum(map(_pss, there)))


def _pss(pid: int) -> int:
    """Return a process's memory in bytes, shared pages divided by the number of their users."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def arrays(folder: str, rank: int = 0, size: int = 1) -> tuple[Array, Array]:
    """Return images `[rows, 784]`, float32, and labels `[rows]`, int64: of every `size`-th file."""
    import pyarrow.parquet as pq

    files = sorted(Path(folder).glob("*.parquet"))[rank::size]
    tables = [pq.read_table(file) for file in files]
    x = [table["image"].combine_chunks().flatten().to_numpy() for table in tables]
    y = [table["label"].to_numpy() for table in tables]
    return np.concatenate(x).reshape(-1, SIDE * SIDE), np.concatenate(y).astype(np.int64)


def keras_model(keras: Any) -> Any:
    """Return the network for Keras, compiled."""
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((SIDE * SIDE,), name="image"),
            layers.Reshape((SIDE, SIDE, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(CLASSES, name="scores"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(LEARNING_RATE), loss)
    return model


def first_batch(keras: Any, told: Told) -> Any:
    """Return a callback that tells of the first batch."""

    class First(keras.callbacks.Callback):  # type: ignore[misc]
        has_told = False

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if not self.has_told:
                self.has_told = True
                told.mark("first")

    return First()


def torch_model() -> Any:
    """Return the network for PyTorch; it takes images `[rows, 784]`."""
    from torch import nn

    return nn.Sequential(
        nn.Unflatten(1, (1, SIDE, SIDE)),
        *(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        nn.Linear(32 * 5 * 5, CLASSES),
    )


def torch_loop(model: Any, epochs: int, batches: Callable[[], Iterator[Any]], told: Told) -> None:
    """Train by Adam; `batches` yields an epoch's pairs of tensors."""
    import torch

    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    is_first = True
    for _ in range(epochs):
        for x, y in batches():
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y.long()).backward()
            optimizer.step()
            if is_first:
                told.mark("first")
                is_first = False


def shuffled(x: Array, y: Array, batch: int) -> Iterator[Any]:
    """Yield full batches of the rows as tensors, in random order."""
    import torch

    images, labels = torch.from_numpy(x), torch.from_numpy(y)
    for part in torch.randperm(len(x)).split(batch):
        if len(part) == batch:
            yield images[part], labels[part]


def udf_accuracy(data: DataFrame, path: str) -> float:
    """Return the accuracy of a saved model of PyTorch's, by pyspark's `predict_batch_udf`."""
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql.types import ArrayType, FloatType

    def make_predict() -> Any:
        import torch

        model = torch.load(path, weights_only=False)

        def predict(images: Array) -> Array:
            with torch.no_grad():
                scores: Array = model(torch.from_numpy(np.ascontiguousarray(images))).numpy()
            return scores

        return predict

    predict = predict_batch_udf(
        make_predict,
        return_type=ArrayType(FloatType()),
        batch_size=1024,
        input_tensor_shapes=[[SIDE * SIDE]],
    )
    return accuracy(data.withColumn("scores", predict("image")))


def accuracy(scored: DataFrame) -> float:
    """Return the share of rows whose label has the highest of their scores."""
    rows = scored.select("label", "scores").collect()
    return float(np.mean([np.argmax(row.scores) == row.label for row in rows]))
