"""TensorFlowOnSpark: two nodes fed from an RDD, as in its example for MNIST; `TFModel` scores.

Its nodes take nine tenths of the steps that there are rows for, because they need not get as many
rows; that is its example's way as well. Keras 3 does not fit under a strategy of several workers by
itself, so this is Keras 2 (tf_keras). It wants one task slot on each executor.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

from harness import NODES
from jobs import (
    SIDE,
    Phases,
    Told,
    compete,
    first_batch,
    keras_model,
    options,
    spark_session,
)


def map_fun(args: argparse.Namespace, ctx: Any) -> None:
    """Be the user's function on a node."""
    import numpy as np
    import tensorflow as tf

    args.told.mark("entered")
    feed = ctx.get_data_feed()

    batch = args.batch * NODES  # the strategy cuts what it takes for a global batch into parts

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
        callbacks=[first_batch(tf.keras, args.told)],
    )
    args.told.mark("trained")
    # All workers save, because some variables are reduced then; the chief's is the model.
    is_chief = ctx.job_name in ("chief", "master")
    model.save(args.model if is_chief else f"{args.model}-{ctx.task_index}", save_format="tf")
    feed.terminate()


def job(parsed: argparse.Namespace, phases: Phases, told: Told) -> float:
    """Be the user's program."""
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    from tensorflowonspark import TFCluster
    from tensorflowonspark.pipeline import TFModel

    parsed.told = told
    with spark_session(phases, slots=1) as spark:
        data = spark.read.parquet(parsed.train).select("image", "label")
        parsed.steps = max(1, int(0.9 * parsed.rows / parsed.batch / NODES))
        cluster = TFCluster.run(
            spark.sparkContext,
            map_fun,
            parsed,
            num_executors=NODES,
            num_ps=0,
            input_mode=TFCluster.InputMode.SPARK,
            master_node="chief",
        )
        cluster.train(data.rdd.map(list), num_epochs=parsed.epochs)
        told.end(phases, parsed.deadline_s)
        phases.end("save")
        cluster.shutdown(grace_secs=10)
        phases.end("shutdown")
        model = TFModel({"num_gpus": 0}).setExportDir(parsed.model).setBatchSize(1024)
        model.setInputMapping({"image": "image"}).setOutputMapping({"scores": "scores"})
        model.setSignatureDefKey("serving_default").setTagSet("serve")
        test = spark.read.parquet(parsed.test)
        labels = [row.label for row in test.select("label").collect()]
        scored = model.transform(test.select("image")).collect()
        share = _share(scored, labels)
        phases.end("score")
    return share


def _share(scored: list[Any], labels: list[int]) -> float:
    """Return the share of rows that are right: its `TFModel` returns scores alone, in order."""
    pairs = zip(scored, labels, strict=True)
    right = [max(range(10), key=row[0].__getitem__) == label for row, label in pairs]
    return sum(right) / len(right)


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, required=True, help="rows of the training data")
    compete(parser.parse_args(), job)
