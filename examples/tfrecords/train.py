"""TFRecord files: Spark writes them and reads them back; nodes train on them with tf.data.

    spark-submit examples/tfrecords/train.py --data /data/digits --model /data/digits.keras

Data: the folder `--data`, which all executors share. If it does not exist, the program writes
scikit-learn's digits there. Spark needs neither a jar nor TensorFlow for these files. Prints
`TFRecords: training accuracy`, above 0.8. Takes about 40 seconds on two cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import sparkdl
import sparkdl.data
from sparkdl.tfos import compat

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def train(args: argparse.Namespace, ctx: sparkdl.NodeContext) -> float:
    """Train on this node's share of the files; return the accuracy. Runs once in every node."""
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # must precede other TensorFlow calls

    def parse(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image = tf.io.FixedLenFeature([64], tf.float32)
        label = tf.io.FixedLenFeature([], tf.int64)
        batch = tf.io.parse_example(records, {"image": image, "label": label})
        return batch["image"], batch["label"]

    files = tf.data.Dataset.list_files(f"{args.data}/train/part-*", shuffle=False)
    data = files.shard(ctx.num_workers, ctx.rank).interleave(tf.data.TFRecordDataset)
    # Files differ in rows, but all nodes must take the same number of steps: hence `repeat`.
    data = data.shuffle(2000).repeat().batch(args.batch_size).map(parse).prefetch(2)
    options = tf.data.Options()
    compat.disable_auto_shard(options)  # `shard` has split the files

    with strategy.scope():
        layers = [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
        model = keras.Sequential(layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    history = model.fit(
        data.with_options(options),
        epochs=args.epochs,
        steps_per_epoch=args.steps,
        verbose=2 if ctx.is_chief else 0,
    )
    if ctx.is_chief:
        model.save(args.model)
    return float(history.history["accuracy"][-1])


def digits(spark: SparkSession) -> list[DataFrame]:
    """Return training and test rows of `image: array<float>` (64) and `label: long`."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    rows = list(zip((images / 16.0).tolist(), labels.tolist(), strict=True))
    frame = spark.createDataFrame(rows, "image array<float>, label long").repartition(4)
    return frame.randomSplit([0.8, 0.2], seed=1)


def main() -> None:
    """Write, read back, and train, in the Spark session of spark-submit."""
    from pyspark.sql import SparkSession

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="out/digits-tfrecords", help="folder of the files")
    parser.add_argument("--model", default="out/digits.keras", help="where the chief saves it")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="per node")
    args = parser.parse_args()
    args.data, args.model = (str(Path(path).absolute()) for path in (args.data, args.model))

    spark = SparkSession.builder.appName("sparkdl TFRecords").getOrCreate()
    try:
        if not Path(args.data).exists():
            for name, rows in zip(("train", "test"), digits(spark), strict=True):
                sparkdl.data.write_tfrecords(rows, f"{args.data}/{name}")
        rows = sparkdl.data.read_tfrecords(spark, f"{args.data}/train")
        print(f"TFRecords: {rows.count()} training rows of {rows.schema.simpleString()}")
        args.steps = rows.count() // (args.nodes * args.batch_size)
        accuracies = sparkdl.run(
            spark, train, args, args.nodes, observe=sparkdl.Observe(log_to_driver=True)
        )
        print(f"TFRecords: model saved in {args.model}")
        print(f"TFRecords: training accuracy {accuracies[0]:.2f}")
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
