"""Keras on two workers: a U-Net for segmentation, fed from a DataFrame, with a validation feed.

    spark-submit examples/segmentation/spark.py

The program needs no `steps_per_epoch`: all nodes take the same number of steps, and an epoch uses
each row once. `fit` reads an epoch of the validation feed after each training epoch, and `evaluate`
reads one more.

Data: generated images. Prints `validation loss`, below 0.3, and `intersection over
union`, above 0.6. Takes about 50 seconds on two cores.
"""

from __future__ import annotations

import argparse

import numpy as np

import sparkdl

SIZE = 32


def make_images(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images and masks, both float32 `[count, 32, 32]`: a bright disk in noise."""
    random = np.random.default_rng(seed)
    row, column = random.uniform(8, SIZE - 8, (2, count, 1, 1))
    radius = random.uniform(4, 8, (count, 1, 1))
    grid = np.arange(SIZE)
    masks = (grid[:, None] - row) ** 2 + (grid - column) ** 2 < radius**2
    images = masks + random.normal(0, 0.5, masks.shape)
    return images.astype(np.float32), masks.astype(np.float32)


def make_model():
    """Return a small U-Net: logits `[rows, 32, 32]` for images of the same shape."""
    import keras
    from keras import layers

    image = keras.Input((SIZE, SIZE))
    fine = layers.Reshape((SIZE, SIZE, 1))(image)
    fine = layers.Conv2D(8, 3, padding="same", activation="relu")(fine)
    coarse = layers.Conv2D(16, 3, strides=2, padding="same", activation="relu")(fine)
    coarse = layers.Conv2D(16, 3, padding="same", activation="relu")(coarse)
    both = layers.concatenate([fine, layers.UpSampling2D()(coarse)])
    logits = layers.Reshape((SIZE, SIZE))(layers.Conv2D(1, 3, padding="same")(both))
    model = keras.Model(image, logits)
    model.compile(keras.optimizers.Adam(1e-2), keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def iou(logits: np.ndarray, masks: np.ndarray) -> float:
    """Return the intersection over union of the predicted and the true masks."""
    found, there = logits > 0, masks > 0.5
    return float((found & there).sum() / (found | there).sum())


def train(args: argparse.Namespace, ctx: sparkdl.NodeContext) -> tuple[float, float]:
    """Train and score; return the validation loss and `iou`. Runs once in every node."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = make_model()
    data = ctx.dataset(args.batch_size, x="image", y="mask", shuffle=True)
    unseen = ctx.dataset(args.batch_size, x="image", y="mask", feed="validation")
    verbose = 2 if ctx.is_chief else 0
    model.fit(data, validation_data=unseen, epochs=args.epochs, verbose=verbose)
    loss = model.evaluate(unseen, verbose=0)

    images, masks = make_images(200, seed=1)
    return loss, iou(model.predict(images, verbose=0), masks)


def images_of(spark, count: int, seed: int):
    """Return a DataFrame of `image` and `mask`: `array<array<float>>`, 32 by 32."""
    rows = "image array<array<float>>, mask array<array<float>>"

    def make(batches):
        import pandas as pd

        for batch in batches:
            for number in batch["id"]:
                images, masks = make_images(100, seed=seed + int(number))
                yield pd.DataFrame({"image": images.tolist(), "mask": masks.tolist()})

    return spark.range(count // 100).repartition(4).mapInPandas(make, rows)


def main() -> None:
    """Feed the nodes, and print the results of the first node."""
    from pyspark.sql import SparkSession

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="per node")
    args = parser.parse_args()
    spark = SparkSession.builder.appName("sparkdl segmentation").getOrCreate()
    try:
        with sparkdl.launch(
            spark, train, args, args.nodes, observe=sparkdl.Observe(log_to_driver=True)
        ) as cluster:
            # Starts before the training feed, and has one more epoch, for `evaluate`.
            unseen = images_of(spark, 200, seed=1000)
            cluster.feed_async(unseen, epochs=args.epochs + 1, feed="validation")
            report = cluster.feed(images_of(spark, args.images, seed=2), epochs=args.epochs)
            loss, overlap = cluster.results()[0]
        print(f"segmentation: {report.rows_used} rows used, by node {report.rows}")
        print(f"segmentation: validation loss {loss:.3f}, intersection over union {overlap:.2f}")
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
