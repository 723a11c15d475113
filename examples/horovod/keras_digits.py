"""A Horovod program for Keras on handwritten digits; only its imports have changed.

    spark-submit examples/horovod/keras_digits.py --processes 2

`hvd` is `sparkdl.horovod.keras`; the program needs neither Horovod nor MPI. Each process trains on
its share of the images. All processes average their gradients and metrics, and the learning rate
warms up to the rate scaled for the larger global batch.

Data: the 1,797 images of scikit-learn's `load_digits`. Prints `test accuracy`, above 0.9. Takes
about 45 seconds on two cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pyspark.sql import SparkSession

import sparkdl.horovod.spark


def train(epochs: int, folder: str) -> float:
    """Train in one of the processes; return the test accuracy."""
    import keras
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    import sparkdl.horovod.keras as hvd

    hvd.init()
    images, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(images / 16, labels, test_size=0.2, random_state=1)
    rows = len(x) // hvd.size() * hvd.size()  # equal shares: all take the same steps
    x, y = x[hvd.rank() : rows : hvd.size()], y[hvd.rank() : rows : hvd.size()]

    layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    rate = 1e-3 * hvd.size()
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(rate)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=3),
    ]
    if hvd.rank() == 0:
        callbacks.append(keras.callbacks.ModelCheckpoint(f"{folder}/digits.keras"))
    model.fit(x, y, batch_size=32, epochs=epochs, callbacks=callbacks, verbose=0)
    return float(model.evaluate(x_test, y_test, verbose=0)[1])


def main() -> None:
    """Start the processes, and print the test accuracy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--folder", default="out/horovod", help="for the model")
    args = parser.parse_args()

    spark = SparkSession.builder.appName("horovod").getOrCreate()
    folder = Path(args.folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    found = sparkdl.horovod.spark.run(train, (args.epochs, str(folder)), num_proc=args.processes)
    print(f"test accuracy {min(found):.2f}")
    spark.stop()


if __name__ == "__main__":
    main()
