"""Parameter servers: workers train asynchronously on rows that the chief reads; handwritten digits.

    spark-submit examples/parameter_server.py

Needs four task slots: for a parameter server, the chief and two workers.

Data: the 1,797 images of scikit-learn's `load_digits`. Prints `test accuracy`, above 0.85. Takes
about 60 seconds on two cores.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import sparkdl

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl import NodeContext


def train(args: argparse.Namespace, ctx: NodeContext) -> float:
    """Train until the feed ends; return the test accuracy. Runs on the chief."""
    import numpy as np
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weights = tf.Variable(tf.zeros([64, 10]))
        bias = tf.Variable(tf.zeros([10]))

    @tf.function
    def step(images: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, images @ weights + bias)
            loss = tf.reduce_mean(losses)
        by_weights, by_bias = tape.gradient(loss, (weights, bias))
        weights.assign_sub(0.1 * by_weights)
        bias.assign_sub(0.1 * by_bias)

    while ctx.has_epoch():
        for images, labels in ctx.dataset(args.batch_size, x="image", y="label", shuffle=True):
            coordinator.schedule(step, args=(images, labels))
        coordinator.join()
    hits = [
        np.argmax(batch["image"] @ weights.numpy() + bias.numpy(), axis=1) == batch["label"]
        for batch in ctx.batches(256, feed="test")
    ]
    return float(np.mean(np.concatenate(hits)))


def digits(spark: SparkSession) -> list[DataFrame]:
    """Return training and test rows of `image: array<float>` (64) and `label: long`."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    rows = list(zip((images / 16.0).tolist(), labels.tolist(), strict=True))
    frame = spark.createDataFrame(rows, "image array<float>, label long").repartition(4)
    return frame.randomSplit([0.8, 0.2], seed=1)


def run(spark: SparkSession, args: argparse.Namespace) -> float:
    """Train and test; return the test accuracy."""
    training, test = digits(spark)
    cluster = sparkdl.launch(
        spark, train, args, nodes=2 + args.workers, roles=sparkdl.Roles(ps=1, chief="chief")
    )
    with cluster:
        print(cluster.feed(training, epochs=args.epochs))
        cluster.end_feeds("input")
        cluster.feed(test, feed="test", role="chief")
        accuracy = float(cluster.results()[0])
    print(f"test accuracy {accuracy:.2f}, {args.workers} workers")
    return accuracy


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=15, help="passes over the rows (default 15)")
    parser.add_argument("--batch-size", type=int, default=32)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run in the Spark session of spark-submit."""
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.appName("sparkdl parameter server").getOrCreate()
    try:
        run(spark, parse(argv))
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
