"""Training on a stream: the model learns from files as they come, and is saved when it stops.

    spark-submit examples/streaming.py --data /data/digits-stream

Parquet files that are put into the folder `--data` are trained on, two nodes in step, until there
is a file `_stop` in it (`touch /data/digits-stream/_stop`), or with `--once` until those that are
there have been used. Started again, the program goes on behind the files that it has used, which
Spark remembers in the folder `--checkpoint`, with the model that it saved. If `--data` is not
there, the handwritten digits of scikit-learn are written into it.

Prints `accuracy over the stream`, above 0.6. Takes about 35 seconds on two cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import sparkdl


def train(args: argparse.Namespace, ctx: sparkdl.NodeContext) -> float:
    """Train until the stream ends; return the accuracy over it. Runs once in every node."""
    import keras
    import numpy as np
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        is_there = Path(args.model).exists()
        model = keras.saving.load_model(args.model) if is_there else make_model(keras)
    accuracies = []
    # Each micro-batch is an epoch. `has_epoch` waits for one, and is false when the stream ends.
    while ctx.has_epoch():
        data = ctx.dataset(args.batch_size, x="image", y="label")
        history = model.fit(data, verbose=0)
        accuracies.append(history.history["accuracy"][-1])
        if ctx.is_chief:
            print(f"micro-batch {len(accuracies)}: accuracy {accuracies[-1]:.2f}", flush=True)
    model.save(args.model)  # which only the first node writes
    return float(np.mean(accuracies))


def make_model(keras):
    """Return a model of 64 pixels to the logits of ten digits."""
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    return model


def write_digits(folder: Path) -> None:
    """Write the digits as Parquet files of `image: list<float>` (64) and `label: int64`."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    table = pa.table({"image": list((images / 16).astype("float32")), "label": labels})
    folder.mkdir(parents=True)
    for number in range(8):
        pq.write_table(table.slice(number * 225, 225), folder / f"{number}.parquet")


def main() -> None:
    """Run on the session that spark-submit set up."""
    from pyspark.sql import SparkSession

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="out/stream", help="folder of the files")
    parser.add_argument("--checkpoint", default="out/stream-checkpoint")
    parser.add_argument("--model", default="out/stream.keras")
    parser.add_argument("--once", action="store_true", help="stop behind the files that are there")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="per node")
    args = parser.parse_args()
    args.model = str(Path(args.model).absolute())
    if not Path(args.data).exists():
        write_digits(Path(args.data))
    stop = Path(args.data, "_stop")
    stop.unlink(missing_ok=True)

    spark = SparkSession.builder.appName("sparkdl streaming").getOrCreate()
    try:
        files = spark.readStream.schema("image array<float>, label long")
        stream = files.option("maxFilesPerTrigger", 1).parquet(args.data)
        with sparkdl.launch(
            spark, train, args, args.nodes, observe=sparkdl.Observe(log_to_driver=True)
        ) as cluster:
            query = cluster.train_stream(
                stream,
                checkpoint_location=args.checkpoint,
                trigger={"availableNow": True} if args.once else "5 seconds",
            )
            while not query.awaitTermination(2):
                if stop.exists():
                    query.stop()
            accuracies = cluster.results()
        print(f"streaming: accuracy over the stream {accuracies[0]:.2f}")
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
