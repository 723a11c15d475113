"""Segmentation, step 2 of 3: the program of `single.py` on several nodes, without Spark.

    python examples/segmentation/distributed.py --nodes 2

The nodes are processes of this machine (`executor="local"`): a debugger works, no Spark is needed.
Each makes a part of the images, and all train one model. With a session in the place of `None` and
without `executor`, the same nodes run in the executors of a Spark cluster.

Data: images made by the program. Prints `intersection over union`, above 0.6. Takes about 25
seconds on two cores.
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
    """Return intersection over union of what was found and what is there."""
    found, there = logits > 0, masks > 0.5
    return float((found & there).sum() / (found | there).sum())


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--images", type=int, default=2000, help="of all nodes together")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="per node")
    return parser.parse_args()


def train(args: argparse.Namespace, ctx: sparkdl.NodeContext) -> float:
    """Train and score. Runs once in every node."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before anything else of TensorFlow
    with strategy.scope():
        model = make_model()
    images, masks = make_images(args.images // ctx.num_workers, seed=2 + ctx.rank)
    data = tf.data.Dataset.from_tensor_slices((images, masks)).batch(args.batch_size).repeat()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    # The batches of a node are its own: they are not to be cut up once more.
    data = strategy.distribute_datasets_from_function(lambda _: data.with_options(options))
    steps = args.images // ctx.num_workers // args.batch_size
    model.fit(data, epochs=args.epochs, steps_per_epoch=steps, verbose=2 if ctx.is_chief else 0)

    images, masks = make_images(200, seed=1)
    return iou(model.predict(images, verbose=0), masks)


def main() -> None:
    """Run the nodes, and tell what the first one found."""
    args = parse()
    results = sparkdl.run(
        None, train, args, args.nodes, executor="local", observe=sparkdl.Observe(log_to_driver=True)
    )
    print(f"segmentation: intersection over union {results[0]:.2f}")


if __name__ == "__main__":
    main()
