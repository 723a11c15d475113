"""One node: training fed by Spark, the same training on arrays in memory, or the feed alone.

All three run in a child of sparkdl. TensorFlow computes in one thread, so that on a machine of few
cores a core is left to the feed; compiling the step is not timed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from feeding import BATCH_ROWS, Touch, cpu_s, drain, feed_session, options
from harness import claim_stdout, mark, wait_for_marks, write

_DEADLINE_S = 120.0


def train(args: argparse.Namespace, ctx: Any) -> dict[str, Any]:
    """Be the user's function on the node."""
    if args.mode == "feed":
        touch = Touch()
        mark(args.folder)
        for _ in range(args.epochs):
            for batch in ctx.batches(BATCH_ROWS):
                touch(batch)
        return {"start": None, **touch.record()}
    fit = compiled(args.hidden)
    if args.mode in ("fed", "ready"):
        mark(args.folder)
        start, dataset = None, ctx.dataset(BATCH_ROWS, x="x", y="y")
    else:
        dataset = in_memory(args.path)
        start = {"at": time.time(), "cpu_s": cpu_s()}
    steps = fit(dataset, args.epochs)
    end = {"start": start, "at": time.time(), "rows": len(steps), "cpu_s": cpu_s()}
    later = [after - before for before, after in pairwise(steps[len(steps) // args.epochs :])]
    return {**end, "step_ms": statistics.median(later) * 1000 if later else None}


def compiled(hidden: int) -> Any:
    """Return a function that fits a model whose step has been compiled: when each step ended."""
    import keras
    import numpy as np
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    model = keras.Sequential(
        [
            keras.layers.Input((784,)),
            keras.layers.Dense(hidden, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ends: list[float] = []

    def fit(dataset: Any, epochs: int) -> list[float]:
        ends.clear()
        model.fit(dataset, epochs=epochs, verbose=0, callbacks=[steps])
        return ends

    def note(batch: int, logs: Any = None) -> None:
        ends.append(time.perf_counter())

    steps = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    fit(as_dataset(np.zeros((BATCH_ROWS * 2 + 1, 784), np.float32), np.zeros(513, np.int32)), 1)
    return fit


def as_dataset(x: Any, y: Any) -> Any:
    """Return batches of arrays, of the same kind as those of the feed: views, from a generator.

    As there nothing is tuned: TensorFlow's tuning thread may keep an epoch from ending for seconds.
    """
    import tensorflow as tf

    def batches() -> Iterator[Any]:
        for start in range(0, len(x), BATCH_ROWS):
            yield x[start : start + BATCH_ROWS], y[start : start + BATCH_ROWS]

    specs = (tf.TensorSpec((None, 784), tf.float32), tf.TensorSpec((None,), tf.int32))
    options = tf.data.Options()
    options.autotune.enabled = False
    return tf.data.Dataset.from_generator(batches, output_signature=specs).with_options(options)


def in_memory(path: str) -> Any:
    """Return all rows of the files as a dataset over two arrays."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    x = table["x"].combine_chunks().flatten().to_numpy().reshape(-1, 784)
    return as_dataset(x, table["y"].to_numpy())


def main() -> None:
    """Run one way, and write a line with what all epochs took."""
    parser = options(__doc__)
    parser.add_argument("--mode", choices=["fed", "ready", "memory", "feed"], required=True)
    parser.add_argument("--hidden", type=int, default=256)
    parsed = parser.parse_args()
    lines = claim_stdout()
    import sparkdl

    with (
        feed_session(slots=2, partitions=parsed.files, executors=1) as spark,
        tempfile.TemporaryDirectory(prefix="bench-overlap-") as folder,
    ):
        data = spark.read.parquet(parsed.path)
        drain(data)
        args = argparse.Namespace(**vars(parsed), folder=folder)
        ready = {"max_restarts": 1, "checkpoint_dir": tempfile.mkdtemp()}  # in the scratch folder
        with sparkdl.launch(
            spark,
            train,
            args,
            nodes=1,
            framework="plain" if parsed.mode == "feed" else "tensorflow",
            feeding=sparkdl.Feeding(fed=parsed.mode != "memory"),
            **(ready if parsed.mode == "ready" else {}),
        ) as cluster:
            start = None
            if parsed.mode != "memory":
                wait_for_marks(folder, _DEADLINE_S, nodes=1)
                start = {"at": time.time(), "cpu_s": cpu_s()}
                cluster.feed(data, epochs=parsed.epochs, reader="spark")
            (end,) = cluster.results()
            start = end["start"] or start
            each = parsed.rows if parsed.mode == "feed" else -(-parsed.rows // BATCH_ROWS)
            if end["rows"] != each * parsed.epochs:
                raise ValueError(f"the node had {end['rows']} rows or steps in all epochs")
            done = {
                "event": "done",
                "seconds": end["at"] - start["at"],
                "cpu_s": end["cpu_s"] - start["cpu_s"],
                "counted": end["rows"],
                "step_ms": end.get("step_ms"),
            }
            write(lines, done)


if __name__ == "__main__":
    main()
