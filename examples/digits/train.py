"""Handwritten digits: nodes train a Keras model, fed from a DataFrame, and score the test rows.

    spark-submit examples/digits/train.py

`make demo` runs it on a Spark cluster of this machine. The data are the 1,797 images of
scikit-learn's `load_digits` (https://archive.ics.uci.edu/dataset/80).

Prints `demo: test accuracy`, above 0.9. Takes about 65 seconds on two cores.
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
    """Train, save, then answer inference. Runs once in every node."""
    import numpy as np
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.Input((64,)),
                tf.keras.layers.Dense(128, activation="relu"),
                tf.keras.layers.Dense(64, activation="relu"),
                tf.keras.layers.Dense(10),
            ]
        )
        model.compile(
            optimizer=tf.keras.optimizers.Adam(3e-3),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )

    def say(epoch: int, logs: dict[str, float]) -> None:
        ctx.report(epoch, loss=logs["loss"], accuracy=logs["accuracy"])  # for the bar of progress
        if ctx.is_chief and (epoch == 0 or (epoch + 1) % 3 == 0 or epoch + 1 == args.epochs):
            figures = f"loss {logs['loss']:.3f}, accuracy {logs['accuracy']:.2f}"
            print(f"epoch {epoch + 1:2} of {args.epochs}: {figures}", flush=True)

    data = ctx.dataset(args.batch_size, x="image", y="label")
    told = tf.keras.callbacks.LambdaCallback(on_epoch_end=say)
    history = model.fit(data, epochs=args.epochs, shuffle=False, verbose=0, callbacks=[told])
    if ctx.is_chief:
        Path(args.model).parent.mkdir(parents=True, exist_ok=True)
        model.save(args.model)
        print("the model is saved; now all nodes label the test rows", flush=True)

    feed = ctx.get_data_feed(train_mode=False)
    while not feed.should_stop():
        rows = feed.next_batch(256)
        if rows:
            images = np.array([row.image for row in rows], np.float32)
            digits = np.argmax(model(images, training=False), axis=1)
            feed.batch_results(
                [(row.label, int(digit)) for row, digit in zip(rows, digits, strict=True)]
            )
    return dict(history.history)


def digits(spark: SparkSession) -> tuple[DataFrame, DataFrame]:
    """Return the digits as two DataFrames of `image: array<float>` (64) and `label: long`."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    rows = [
        (image.tolist(), int(label)) for image, label in zip(images / 16.0, labels, strict=True)
    ]
    frame = spark.createDataFrame(rows, "image array<float>, label long").repartition(4)
    train, test = frame.randomSplit([0.8, 0.2], seed=1)
    return train.cache(), test.cache()


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2, help="training nodes (default 2)")
    parser.add_argument("--epochs", type=int, default=15, help="epochs (default 15)")
    parser.add_argument(
        "--batch-size", type=int, default=32, help="rows per node and step (default 32)"
    )
    parser.add_argument("--num-gpus", type=int, default=0, help="GPUs for each node (default 0)")
    parser.add_argument(
        "--model",
        default="out/digits.keras",
        help="where the chief saves the model (default out/digits.keras)",
    )
    args = parser.parse_args(argv)
    args.model = str(Path(args.model).absolute())
    return args


def run(spark: SparkSession, args: argparse.Namespace) -> float:
    """Train and score; return the test accuracy."""
    train, test = digits(spark)
    tell(
        f"two DataFrames of handwritten digits: {train.count()} training rows, {test.count()} test"
    )
    tell(f"{args.nodes} nodes start: processes with TensorFlow in the executors of Spark")
    start = time.monotonic()
    cluster = TFCluster.run(
        spark.sparkContext,
        map_fun,
        args,
        args.nodes,
        input_mode=TFCluster.InputMode.SPARK,
        observe=Observe(log_to_driver=True),
    )
    with cluster:
        tell(f"{args.epochs} epochs of training: each row goes to one of the nodes, which average")
        tell("their gradients at each step, so that all have the same weights")
        cluster.train(train, num_epochs=args.epochs)
        scored = cluster.inference(test.rdd).collect()
    seconds = time.monotonic() - start
    right = sum(label == digit for label, digit in scored)
    accuracy = float(right / len(scored))
    tell(f"{right} of {len(scored)} test rows got the right label")
    tell(f"the model is in {args.model}; keras.saving.load_model opens it")
    tell("next:")
    tell(f"  read the program that has run: {Path(__file__).resolve()}")
    tell(f"  write your own, step by step: {docs_page('tutorial')}")
    tell(f"  see a training in a browser while it runs: {docs_page('dashboard')}")
    tell(f"  look at your own Spark cluster before a training: {docs_page('doctor')}")
    tell(f"test accuracy {accuracy:.2f}, {args.nodes} nodes, {seconds:.1f} s")
    return accuracy


def tell(text: str) -> None:
    """Print a line of the demo at once, in its order with the lines of the nodes."""
    print(f"demo: {text}", flush=True)


def main(argv: list[str] | None = None) -> None:
    """Run the demo on the session that spark-submit set up."""
    from pyspark.sql import SparkSession

    args = parse(argv)
    spark = SparkSession.builder.appName("sparkdl digits").getOrCreate()
    try:
        run(spark, args)
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
