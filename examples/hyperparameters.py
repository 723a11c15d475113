"""Hyper-parameters: independent trials, as many at once as Spark has task slots.

    spark-submit examples/hyperparameters.py --learning-rates 0.1 0.01 0.001 --units 16 64

Each trial is a process of its own on an executor and knows nothing of the others. What they return
comes back as a list.

Data: the 1,797 images of scikit-learn's `load_digits`. Prints `best accuracy`, above 0.9. Takes
about 30 seconds on two cores.
"""

from __future__ import annotations

import argparse
from itertools import product
from typing import TYPE_CHECKING, Any

from sparkdl.tfos import TFParallel

if TYPE_CHECKING:
    from sparkdl.tfos.TFSparkNode import TFNodeContext


def trial(args: argparse.Namespace, ctx: TFNodeContext) -> dict[str, Any]:
    """Train with the choice of this run's number; return it with the accuracy that it reached."""
    import keras
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    choice = args.choices[ctx.worker_num]
    images, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(images / 16, labels, test_size=0.25, random_state=0)

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(choice["units"], activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(choice["learning_rate"]), loss, metrics=["accuracy"])
    model.fit(x, y, epochs=5, verbose=0)
    _, accuracy = model.evaluate(x_test, y_test, verbose=0)
    return {**choice, "accuracy": float(accuracy)}


def main() -> None:
    """Run the trials on the session that spark-submit set up."""
    from pyspark.sql import SparkSession

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[0.1, 0.01, 0.001])
    parser.add_argument("--units", type=int, nargs="+", default=[16, 64])
    args = parser.parse_args()
    args.choices = [
        {"learning_rate": rate, "units": units}
        for rate, units in product(args.learning_rates, args.units)
    ]

    spark = SparkSession.builder.appName("sparkdl hyper-parameters").getOrCreate()
    try:
        # Without a barrier a trial begins when a task slot is free, however many there are.
        found = TFParallel.run(
            spark.sparkContext, trial, args, len(args.choices), use_barrier=False
        )
        found.sort(key=lambda one: one["accuracy"])
        for one in found:
            print(
                "hyper-parameters: {learning_rate:g}, {units} units: {accuracy:.3f}".format(**one)
            )
        print(f"hyper-parameters: best accuracy {found[-1]['accuracy']:.3f}")
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
