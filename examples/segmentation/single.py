"""Segmentation, step 1 of 3: a plain Keras program for one machine.

    python examples/segmentation/single.py

It finds the disks in noisy images. `distributed.py` and `spark.py` are the same program for several
nodes; `diff` shows what changes from step to step.

Data: images made by the program. Prints `intersection over union`, above 0.6. Takes about 20
seconds on two cores.
"""

from __future__ import annotations

import argparse

import numpy as np

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
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    return parser.parse_args()


def main() -> None:
    """Train and score."""
    args = parse()
    images, masks = make_images(args.images, seed=0)
    model = make_model()
    model.fit(images, masks, batch_size=args.batch_size, epochs=args.epochs, verbose=2)

    images, masks = make_images(200, seed=1)
    print(
        f"segmentation: intersection over union {iou(model.predict(images, verbose=0), masks):.2f}"
    )


if __name__ == "__main__":
    main()
