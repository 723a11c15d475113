"""Handwritten digits on parameter servers: workers train asynchronously on the rows fed to them.

Runs in: driver

    spark-submit examples/parameter_server.py

Needs tf_keras, and four slots: a parameter server, the chief, two workers. The data are the 1,797
images of scikit-learn's `load_digits` (https://archive.ics.uci.edu/dataset/80).

Prints `test accuracy`, above 0.85. Takes about 60 seconds on two cores.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import sparkdl
from sparkdl.demo import digits

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkdl import NodeContext


def train(args: argparse.Namespace, ctx: NodeContext) -> float:
    """Train until the rows are over; return the accuracy on the test rows. Runs on the chief."""
    import numpy as np
    import tf_keras

    strategy = ctx.parameter_server_strategy()
    with strategy.scope():
        model = digits_model(tf_keras)
        model.compile(
            tf_keras.optimizers.legacy.Adam(2e-3),
            tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    dataset_fn = ctx.fed_dataset_fn(args.batch_size, x="image", y="label", shuffle=True)
    # An epoch is a number of steps. The end of the feed ends the training, whatever the epoch.
    model.fit(
        tf_keras.utils.experimental.DatasetCreator(dataset_fn),
        epochs=1000,
        steps_per_epoch=100,
        verbose=2,
    )
    local = digits_model(tf_keras)
    local.set_weights(model.get_weights())
    rights = [
        np.argmax(local(batch["image"]), axis=1) == batch["label"]
        for batch in ctx.batches(256, feed="test")
    ]
    return float(np.mean(np.concatenate(rights)))


def digits_model(keras: Any) -> Any:
    """Return a model of 64 pixels to the logits of ten digits."""
    layers = keras.layers
    return keras.Sequential(
        [layers.Dense(64, activation="relu", input_shape=(64,)), layers.Dense(10)]
    )


def run(spark: SparkSession, args: argparse.Namespace) -> float:
    """Train and test; return the accuracy on the test rows."""
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
    """Run on the session that spark-submit set up."""
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.appName("sparkdl parameter server").getOrCreate()
    try:
        run(spark, parse(argv))
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
