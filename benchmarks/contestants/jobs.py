"""The contestants of `job.py`: train a small convolutional network by Adam, save it, score."""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from harness import (
    NODES,
    arguments,
    claim_stdout,
    mark,
    marked,
    own_cpu_s,
    pss,
    session,
    tf_cluster,
    wait_for_marks,
    write,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SIDE = 28
CLASSES = 10
BATCH = 64
"""Rows per node and step."""
LEARNING_RATE = 1e-3
_DEADLINE_S = 1800.0
_MEMORY_MIB = 2048

Array = np.ndarray[Any, Any]
Args = argparse.Namespace


class Phases:
    """The seconds of consecutive phases, from now on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.time()

    def end(self, phase: str, at: float | None = None) -> None:
        """End a phase, now or at a given time."""
        now = time.time() if at is None else at
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


class Reports:
    """Times that the nodes reported: a folder of marks for each event."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        for event in ("entered", "first", "trained"):
            Path(folder, event).mkdir(exist_ok=True)

    def mark(self, event: str) -> None:
        """On a node: record this event."""
        mark(str(Path(self._folder, event)))

    def end(self, phases: Phases, nodes: int = NODES) -> None:
        """On the driver: end each phase at the time that the last node reported."""
        names = {"entered": "launch", "first": "first batch", "trained": "epochs"}
        for event, phase in names.items():
            phases.end(phase, wait_for_marks(Path(self._folder, event), _DEADLINE_S, nodes)[-1])
        phases.end("save")


def sparkdl_keras(args: Args, ctx: Any) -> None:
    import keras
    import tensorflow as tf

    args.reports.mark("entered")
    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = keras_model(keras)
    data = ctx.dataset(BATCH, x="image", y="label")
    model.fit(data, epochs=args.epochs, verbose=0, callbacks=[first_batch(keras, args.reports)])
    args.reports.mark("trained")
    if ctx.is_chief:
        model.save(f"{args.model}.keras")


def sparkdl_torch(args: Args, ctx: Any) -> None:
    import torch
    import torch.distributed as dist

    args.reports.mark("entered")
    dist.init_process_group()
    data = ctx.torch_dataset(BATCH, x="image", y="label")
    loader = torch.utils.data.DataLoader(data, batch_size=None)
    train_ddp(args, lambda: iter(loader))


def score_torch(path: str) -> Callable[[Mapping[str, Array]], Array]:
    """Return a function that scores rows with a saved model."""
    score = load_torch(path)
    return lambda columns: score(columns["image"])


def by_sparkdl(args: Args, phases: Phases) -> float:
    """Two nodes, fed from a DataFrame or reading its files; `TFModel` or `predict` scores."""
    import sparkdl
    from sparkdl import predict

    is_keras = args.framework == "keras"
    train = sparkdl_keras if is_keras else sparkdl_torch
    framework = "tensorflow" if is_keras else "torch"
    with spark_session(phases, slots=2) as spark:
        with sparkdl.launch(spark, train, args, nodes=NODES, framework=framework) as cluster:
            data = f"{args.train}/*.parquet" if args.files else spark.read.parquet(args.train)
            cluster.feed(data, epochs=args.epochs)
            cluster.results(_DEADLINE_S)
            args.reports.end(phases)
        phases.end("shutdown")
        test = spark.read.parquet(args.test)
        if is_keras:
            model = sparkdl.TFModel().setExportDir(f"{args.model}.keras").setBatchSize(1024)
            model.setInputMapping({"image": "image"}).setOutputMapping({"scores": "scores"})
            share = accuracy(model.transform(test))
        else:
            load = partial(score_torch, f"{args.model}.pt")
            share = accuracy(predict(test, load, ["image"], "scores array<float>", batch_size=1024))
        phases.end("score")
    return share


def tfos_map_fun(args: Args, ctx: Any) -> None:
    import tensorflow as tf

    args.reports.mark("entered")
    feed = ctx.get_data_feed()
    batch = BATCH * NODES  # the strategy splits the global batch among the nodes

    def batches() -> Iterator[Any]:
        while not feed.should_stop():
            rows = feed.next_batch(batch)
            if len(rows) == batch:
                images, labels = zip(*rows, strict=True)
                yield np.array(images, np.float32), np.array(labels, np.int64)

    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = keras_model(tf.keras)
    shapes = ((batch, SIDE * SIDE), (batch,))
    data = tf.data.Dataset.from_generator(batches, (tf.float32, tf.int64), shapes)
    off = tf.data.Options()
    off.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    model.fit(
        data.with_options(off),
        epochs=args.epochs,
        steps_per_epoch=args.steps,
        verbose=0,
        callbacks=[first_batch(tf.keras, args.reports)],
    )
    args.reports.mark("trained")
    # All workers save, because some variables are reduced then; the chief's is the model.
    is_chief = ctx.job_name in ("chief", "master")
    model.save(args.model if is_chief else f"{args.model}-{ctx.task_index}", save_format="tf")
    feed.terminate()


def by_tfos(args: Args, phases: Phases) -> float:
    """Two nodes fed from an RDD, as in its example for MNIST; its `TFModel` scores.

    The nodes take 90 % of the possible steps, as in its example, because they may get different
    numbers of rows. Keras 3 does not `fit` under a strategy of several workers without help, so
    this is Keras 2 (tf_keras). It needs one task slot on each executor.
    """
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    from tensorflowonspark.pipeline import TFModel

    with spark_session(phases, slots=1) as spark:
        data = spark.read.parquet(args.train).select("image", "label")
        args.steps = max(1, int(0.9 * args.rows / BATCH / NODES))
        cluster = tf_cluster(spark, tfos_map_fun, args)
        cluster.train(data.rdd.map(list), num_epochs=args.epochs)
        args.reports.end(phases)
        cluster.shutdown(grace_secs=10)
        phases.end("shutdown")
        model = TFModel({"num_gpus": 0}).setExportDir(args.model).setBatchSize(1024)
        model.setInputMapping({"image": "image"}).setOutputMapping({"scores": "scores"})
        model.setSignatureDefKey("serving_default").setTagSet("serve")
        test = spark.read.parquet(args.test)
        labels = [row.label for row in test.select("label").collect()]
        scored = model.transform(test.select("image")).collect()  # only scores, in order
        share = np.mean([np.argmax(row[0]) == y for row, y in zip(scored, labels, strict=True)])
        phases.end("score")
    return float(share)


def distributor_train(args: Args) -> None:
    import torch  # noqa: F401
    import torch.distributed as dist

    args.reports.mark("entered")
    dist.init_process_group("gloo")
    x, y = arrays(args.train, dist.get_rank(), dist.get_world_size())
    train_ddp(args, lambda: shuffled(x, y, BATCH))
    dist.destroy_process_group()


def by_torch(args: Args, phases: Phases) -> float:
    """Two processes that read the files themselves; `predict_batch_udf` scores."""
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.ml.torch.distributor import TorchDistributor
    from pyspark.sql.types import ArrayType, FloatType

    with spark_session(phases, slots=2) as spark:
        distributor = TorchDistributor(num_processes=NODES, local_mode=False, use_gpu=False)
        distributor.run(distributor_train, args)
        args.reports.end(phases)
        predict = predict_batch_udf(
            partial(load_torch, f"{args.model}.pt"),
            return_type=ArrayType(FloatType()),
            batch_size=1024,
            input_tensor_shapes=[[SIDE * SIDE]],
        )
        test = spark.read.parquet(args.test)
        share = accuracy(test.withColumn("scores", predict("image")))
        phases.end("score")
    return share


def by_alone(args: Args, phases: Phases) -> float:
    """One process without Spark, with batches as large as those of two nodes."""
    score = (alone_keras if args.framework == "keras" else alone_torch)(args)
    args.reports.end(phases, nodes=1)
    x, y = arrays(args.test)
    share = float(np.mean(score(x).argmax(1) == y))
    phases.end("score")
    return share


def alone_keras(args: Args) -> Callable[[Array], Array]:
    """Train and save; return what loads the model and scores."""
    import keras

    args.reports.mark("entered")
    x, y = arrays(args.train)
    model = keras_model(keras)
    ticks = [first_batch(keras, args.reports)]
    model.fit(x, y, BATCH * NODES, args.epochs, verbose=0, callbacks=ticks)
    args.reports.mark("trained")
    model.save(path := f"{args.model}.keras")
    return lambda x: keras.saving.load_model(path).predict(x, 1024, verbose=0)


def alone_torch(args: Args) -> Callable[[Array], Array]:
    """Train and save; return what loads the model and scores."""
    import torch

    args.reports.mark("entered")
    x, y = arrays(args.train)
    torch.manual_seed(0)
    model = torch_model()
    torch_loop(model, args, lambda: shuffled(x, y, BATCH * NODES))
    torch.save(model, path := f"{args.model}.pt")
    return lambda x: np.concatenate(
        [*map(load_torch(path), np.split(x, range(1024, len(x), 1024)))]
    )


@contextmanager
def spark_session(phases: Phases, slots: int) -> Iterator[SparkSession]:
    """Start the Spark session that the contestants share, and stop it."""
    settings = {"spark.sql.execution.arrow.pyspark.enabled": "true"}
    with session("bench-job", slots, settings, _MEMORY_MIB) as spark:
        phases.end("Spark")
        yield spark


def arrays(folder: str, rank: int = 0, size: int = 1) -> tuple[Array, Array]:
    """Return images `[rows, 784]`, float32, and labels `[rows]`, int64, of every `size`-th file."""
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


def first_batch(keras: Any, reports: Reports) -> Any:
    """Return a callback that records the first batch."""

    class First(keras.callbacks.Callback):  # type: ignore[misc]
        has_told = False

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if not self.has_told:
                self.has_told = True
                reports.mark("first")

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


def torch_loop(model: Any, args: Args, batches: Callable[[], Iterator[Any]]) -> None:
    """Train with Adam; `batches` yields an epoch's pairs of tensors."""
    import torch

    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    is_first = True
    for _ in range(args.epochs):
        for x, y in batches():
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y.long()).backward()
            optimizer.step()
            if is_first:
                args.reports.mark("first")
                is_first = False
    args.reports.mark("trained")


def train_ddp(args: Args, batches: Callable[[], Iterator[Any]]) -> None:
    """In one of several processes: train with `DistributedDataParallel`; the first one saves."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(torch_model())
    torch_loop(model, args, batches)
    if torch.distributed.get_rank() == 0:
        torch.save(model.module, f"{args.model}.pt")


def load_torch(path: str) -> Callable[[Array], Array]:
    """Return a function that scores images with a saved PyTorch model."""
    import torch

    model = torch.load(path, weights_only=False)

    def score(images: Array) -> Array:
        with torch.no_grad():
            scores: Array = model(torch.from_numpy(np.ascontiguousarray(images))).numpy()
        return scores

    return score


def shuffled(x: Array, y: Array, batch: int) -> Iterator[Any]:
    """Yield full batches of the rows as tensors, in random order."""
    import torch

    images, labels = torch.from_numpy(x), torch.from_numpy(y)
    for part in torch.randperm(len(x)).split(batch):
        if len(part) == batch:
            yield images[part], labels[part]


def accuracy(scored: DataFrame) -> float:
    """Return the share of rows whose label has the highest of their scores."""
    rows = scored.select("label", "scores").collect()
    return float(np.mean([np.argmax(row.scores) == row.label for row in rows]))


class Usage:
    """Samples the usage of all processes of this contestant every second, from enter to exit."""

    def __init__(self) -> None:
        self.nbytes = 0  # at most
        self.cpu_s: dict[str, float] = {}  # of each process, latest sample
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Usage:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(1.0)
            there = marked()
            self.cpu_s.update(own_cpu_s(there))
            self.nbytes = max(self.nbytes, sum(map(pss, there)))


WAYS = {"sparkdl": by_sparkdl, "tfos": by_tfos, "torch": by_torch, "alone": by_alone}


def main() -> None:
    """Run the job, and write a line with its figures."""
    phases, lines = Phases(), claim_stdout()
    args = arguments(framework="", files=False)
    with tempfile.TemporaryDirectory(prefix="bench-job-") as folder, Usage() as usage:
        args.model, args.reports = str(Path(folder, "model")), Reports(folder)
        share = WAYS[args.way](args, phases)
        phases.end("shutdown")
    used = {"CPU s": sum(usage.cpu_s.values()), "GB": usage.nbytes / 1e9}
    total = {"total": sum(phases.seconds.values())}
    write(lines, "job", accuracy=share, **total, **phases.seconds, **used)


if __name__ == "__main__":
    main()
