"""A training that is killed in the middle, and goes on: handwritten digits, with checkpoints.

    python examples/checkpoints.py --die-at 60

Runs on this machine, without Spark: pass a SparkSession to `launch`, and leave `executor` out, to
run it on a cluster. With `--die-at` the first node kills itself at that step; the training begins
anew at the last checkpoint, and the rows that the model has not seen are fed again. Or press
Ctrl-C, kill whatever you like, and start it again: it goes on where the last checkpoint is.

Data: the 1,797 images of scikit-learn's `load_digits`. Prints `goes on at step …` after the kill,
and `checkpoints: training accuracy`. Takes about 15 seconds on two cores.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import sparkdl

EPOCHS, BATCH, EVERY_STEPS = 6, 32, 20


def train(args: argparse.Namespace, ctx: sparkdl.NodeContext) -> float:
    """Train on the rows that are fed. Runs once in every node, and again after a failure."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(1)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        layers = [keras.Input((64,)), keras.layers.Dense(64, activation="relu")]
        model = keras.Sequential([*layers, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])

    last = ctx.last_checkpoint
    print(f"goes on at step {last.step}" if last else "begins at step 0")

    class Dies(keras.callbacks.Callback):  # type: ignore[misc]
        """Kills the first node, once."""

        steps = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 1
            if ctx.is_chief and not ctx.restarts and self.steps == args.die_at:
                print(f"dies at step {args.die_at}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

    checkpoint = sparkdl.keras.Checkpoint(ctx, every_steps=EVERY_STEPS)
    history = model.fit(
        ctx.dataset(BATCH, x="image", y="label"),
        epochs=EPOCHS,
        initial_epoch=checkpoint.initial_epoch,
        callbacks=[checkpoint, Dies()],
        verbose=0,
    )
    return float(history.history["accuracy"][-1]) if history.epoch else 1.0


def digits() -> list[dict[str, Any]]:
    """Return 1792 rows of `image`, 64 floats, and `label`."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    rows = zip((images / 16).tolist(), labels.tolist(), strict=True)
    return [{"image": image, "label": label} for image, label in rows][:1792]


def main() -> None:
    """Feed the digits to nodes on this machine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--die-at", type=int, default=0, help="step; 0 for never")
    parser.add_argument("--checkpoints", default="out/checkpoints", help="folder or URL")
    args = parser.parse_args()

    with sparkdl.launch(
        None,
        train,
        args,
        args.nodes,
        executor="local",
        checkpoint_dir=args.checkpoints,
        max_restarts=3,
        recovery=sparkdl.Recovery(keep_checkpoints=2),
        observe=sparkdl.Observe(log_to_driver=True),
    ) as cluster:
        report = cluster.feed(digits(), epochs=EPOCHS)
        print(f"rows fed now: {sum(report.rows.values())} of {EPOCHS * 1792}")
        print(f"checkpoints: training accuracy {cluster.results()[0]:.2f}")


if __name__ == "__main__":
    main()
