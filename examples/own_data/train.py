"""Nodes that read their own data, from Parquet files. Spark only starts them.

    spark-submit examples/own_data/train.py --data /data/digits

`--data` is a folder that all executors see (a shared disk, HDFS, S3, …). If it is not there, the
handwritten digits of scikit-learn are written into it. Row groups are shared out so that all nodes
take the same number of steps.

Prints `own data: test accuracy`, above 0.8. Takes about 45 seconds on two cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import sparkdl


def train(args: argparse.Namespace, ctx: sparkdl.NodeContext) -> float:
    """Train on the first files and score the last. Runs once in every node."""
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    files = sparkdl.parquet(f"{args.data}/train-*.parquet")
    data = ctx.dataset(args.batch_size, x="image", y="label", feed=files, shuffle=True)
    model.fit(data, epochs=args.epochs, verbose=2 if ctx.is_chief else 0)

    # Evaluation by all nodes together, each on its share of the files.
    files = sparkdl.parquet(f"{args.data}/test.parquet")
    test = ctx.dataset(args.batch_size, x="image", y="label", feed=files)
    return float(model.evaluate(test, verbose=0)[1])


def write_digits(folder: Path) -> None:
    """Write the digits as Parquet files of `image: list<float>` (64) and `label: int64`."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    table = pa.table({"image": list((images / 16).astype("float32")), "label": labels})
    folder.mkdir(parents=True)
    for number in range(4):
        pq.write_table(table.slice(number * 350, 350), folder / f"train-{number}.parquet")
    pq.write_table(table.slice(4 * 350), folder / "test.parquet")


def main() -> None:
    """Run the nodes on the session that spark-submit set up."""
    from pyspark.sql import SparkSession

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="out/digits", help="folder of the files")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="per node")
    args = parser.parse_args()
    args.data = str(Path(args.data).absolute())
    if not Path(args.data).exists():
        write_digits(Path(args.data))

    spark = SparkSession.builder.appName("sparkdl own data").getOrCreate()
    try:
        accuracies = sparkdl.run(
            spark,
            train,
            args,
            args.nodes,
            feeding=sparkdl.Feeding(fed=False),
            observe=sparkdl.Observe(log_to_driver=True),
        )
        print(f"own data: test accuracy {accuracies[0]:.2f}")
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
