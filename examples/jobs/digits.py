"""Training as Spark jobs: no nodes, no ports; each iteration is a Spark job.

    spark-submit examples/jobs/digits.py

The 1797 digits of scikit-learn (https://archive.ics.uci.edu/dataset/80) train a network of Keras
on as many partitions as asked for. They need not fit into the task slots at once: `--master
local[1]` gives the same model.

Prints `jobs: test accuracy`, above 0.9. Takes about a minute on two cores.
"""

from __future__ import annotations

import argparse

from sparkdl import KerasEstimator


def make_model():
    """Return a network from 64 pixels to the probabilities of ten digits."""
    import keras

    layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(10, "softmax")]
    return keras.Sequential([keras.Input((64,)), *layers])


def main() -> None:
    """Train and evaluate on the session that spark-submit set up."""
    import keras
    from pyspark.sql import SparkSession
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(images / 16, labels, test_size=0.25, random_state=0)
    rows = [(pixels.tolist(), int(label)) for pixels, label in zip(x, y, strict=True)]

    spark = SparkSession.builder.appName("sparkdl jobs").getOrCreate()
    try:
        estimator = KerasEstimator(
            make_model(),
            mode="jobs",
            num_workers=args.partitions,
            optimizer=keras.optimizers.Adam(0.01),
            loss="sparse_categorical_crossentropy",
            batch_size=64,
            epochs=args.epochs,
        )
        fitted = estimator.fit(spark.createDataFrame(rows, "features array<float>, label long"))
        accuracy = (fitted.getModel().predict(x_test, verbose=0).argmax(1) == y_test).mean()
        print(f"jobs: test accuracy {accuracy:.3f}")
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
