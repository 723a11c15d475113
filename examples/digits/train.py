"""TensorFlowOnSpark's API: nodes train a Keras model on a DataFrame, then score the test rows.

    spark-submit examples/digits/train.py

Data: the 1,797 images of scikit-learn's `load_digits`. Prints `demo: test accuracy`, above 0.9.
Takes about 65 seconds on two cores. `make demo` runs it on a local Spark cluster.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdl import Observe
from sparkdl.core.texts import docs_page
from sparkdl.tfos import TFCluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl import NodeContext


def map_fun(args: argparse.Namespace, ctx: NodeContext) -> dict[str, list[float]]:
    """Train, save the model, then score rows. Runs once in every node."""
    import numpy as np
    import tensorflow as tf

    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        hidden = [tf.keras.layers.Dense(units, activation="relu") for units in (128, 64)]
        model = tf.keras.Sequential([tf.keras.Input((64,)), *hidden, tf.keras.layers.Dense(10)])
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf.keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])

    def report(epoch: int, logs: dict[str, float]) -> None:
        ctx.report(epoch, loss=logs["loss"], accuracy=logs["accuracy"])  # for the progress bar
        if ctx.is_chief and (epoch + 1) % 3 == 0:
            figures = f"loss {logs['loss']:.3f}, accuracy {logs['accuracy']:.2f}"
            print(f"epoch {epoch + 1:2} of {args.epochs}: {figures}", flush=True)

    data = ctx.dataset(args.batch_size, x="image", y="label")
    callbacks = [tf.keras.callbacks.LambdaCallback(on_epoch_end=report)]
    history = model.fit(data, epochs=args.epochs, shuffle=False, verbose=0, callbacks=callbacks)
    if ctx.is_chief:
        Path(args.model).parent.mkdir(parents=True, exist_ok=True)
        model.save(args.model)
        print("the model is saved; all nodes now score the test rows", flush=True)

    feed = ctx.get_data_feed(train_mode=False)
    while not feed.should_stop():
        rows = feed.next_batch(256)
        if rows:
            images = np.array([row.image for row in rows], np.float32)
            digits = np.argmax(model(images, training=False), axis=1)
            pairs = zip(rows, digits, strict=True)
            feed.batch_results([(row.label, int(digit)) for row, digit in pairs])
    return dict(history.history)


def digits(spark: SparkSession) -> tuple[DataFrame, DataFrame]:
    """Return the digits as two DataFrames of `image: array<float>` (64) and `label: long`."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    rows = zip((images / 16).tolist(), labels.tolist(), strict=True)
    frame = spark.createDataFrame(rows, "image array<float>, label long").repartition(4)
    train, test = frame.randomSplit([0.8, 0.2], seed=1)
    return train.cache(), test.cache()


def run(spark: SparkSession, args: argparse.Namespace) -> float:
    """Train and score; return the test accuracy."""
    train, test = digits(spark)
    log(f"loaded {train.count()} training rows and {test.count()} test rows")
    log(f"starting {args.nodes} nodes: TensorFlow processes on the Spark executors")
    start = time.monotonic()
    mode, observe = TFCluster.InputMode.SPARK, Observe(log_to_driver=True)
    with TFCluster.run(
        spark.sparkContext, map_fun, args, args.nodes, input_mode=mode, observe=observe
    ) as cluster:
        log(f"{args.epochs} epochs: each row goes to one node; the nodes average their gradients")
        cluster.train(train, num_epochs=args.epochs)
        scored = cluster.inference(test.rdd).collect()
    seconds = time.monotonic() - start
    accuracy = sum(label == digit for label, digit in scored) / len(scored)
    log(f"saved the model to {args.model}; keras.saving.load_model loads it")
    log(f"next: read {Path(__file__).resolve()}, or write your own: {docs_page('tutorial')}")
    log(f"test accuracy {accuracy:.2f}, {args.nodes} nodes, {seconds:.1f} s")
    return accuracy


def log(text: str) -> None:
    """Print a line without buffering, so that it keeps its place among the nodes' lines."""
    print(f"demo: {text}", flush=True)


def main() -> None:
    """Run the demo in the Spark session of spark-submit."""
    from pyspark.sql import SparkSession

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="per node")
    parser.add_argument("--model", default="out/digits.keras", help="where the chief saves it")
    args = parser.parse_args()
    args.model = str(Path(args.model).absolute())

    spark = SparkSession.builder.appName("sparkdl digits").getOrCreate()
    try:
        run(spark, args)
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
