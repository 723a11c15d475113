"""Parallel inference: every run loads the saved model, alone, and scores its share of the files.

    spark-submit examples/tfrecords/train.py
    spark-submit examples/tfrecords/inference.py

The first writes the files and the model. Where the rows are in a DataFrame, `sparkdl.TFModel`
scores them instead, see docs/spark-ml.md.

Data: the 1,797 images of scikit-learn's `load_digits`. Prints `inference: test accuracy`, above
0.8. Takes about 80 seconds on two cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdl.tfos import TFParallel

if TYPE_CHECKING:
    from sparkdl.tfos.TFSparkNode import TFNodeContext


def infer(args: argparse.Namespace, ctx: TFNodeContext) -> dict[str, int]:
    """Write a line with label and prediction for each row; return how many there were."""
    import keras
    import numpy as np
    import tensorflow as tf

    def parse(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image = tf.io.FixedLenFeature([64], tf.float32)
        label = tf.io.FixedLenFeature([], tf.int64)
        batch = tf.io.parse_example(records, {"image": image, "label": label})
        return batch["image"], batch["label"]

    model = keras.saving.load_model(args.model)
    files = tf.data.Dataset.list_files(f"{args.data}/test/part-*", shuffle=False)
    data = files.shard(ctx.num_workers, ctx.worker_num).interleave(tf.data.TFRecordDataset)
    counts = {"rows": 0, "right": 0}
    with open(f"{args.output}/part-{ctx.worker_num:05}", "w", encoding="utf-8") as output:
        for images, labels in data.batch(256).map(parse):
            found = np.argmax(model(images, training=False), axis=1)
            for label, digit in zip(labels.numpy(), found, strict=True):
                print(label, digit, file=output)
            counts["rows"] += len(found)
            counts["right"] += int((found == labels).numpy().sum())
    return counts


def main() -> None:
    """Run it on the session that spark-submit set up."""
    from pyspark.sql import SparkSession

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="out/digits-tfrecords", help="folder of the files")
    parser.add_argument("--model", default="out/digits.keras")
    parser.add_argument("--output", default="out/predictions", help="folder of the predictions")
    parser.add_argument("--runs", type=int, default=2, help="how many at once")
    args = parser.parse_args()
    Path(args.output).mkdir(parents=True, exist_ok=True)
    for name in ("data", "model", "output"):
        setattr(args, name, str(Path(getattr(args, name)).absolute()))

    spark = SparkSession.builder.appName("sparkdl parallel inference").getOrCreate()
    try:
        counts = TFParallel.run(spark.sparkContext, infer, args, args.runs)
        rows = [run["rows"] for run in counts]
        print(f"inference: predictions in {args.output}, rows by run {rows}")
        accuracy = sum(run["right"] for run in counts) / sum(rows)
        print(f"inference: test accuracy {accuracy:.2f}")
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
