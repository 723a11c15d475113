"""Keras 3 on JAX: handwritten digits on two nodes by plain `fit`, data or model parallel.

    python examples/jax/keras_digits.py --model-parallel

Runs on this machine, without Spark: pass a SparkSession to `launch`, and leave `executor` out, to
run it on a cluster. Keras needs neither TensorFlow nor PyTorch for this.

Data: the 1,797 images of scikit-learn's `load_digits`. Prints `Keras on JAX: training accuracy`,
above 0.9. Takes about 25 seconds on two cores.
"""

from __future__ import annotations

import argparse
from typing import Any

import sparkdl


def distribution(is_model_parallel: bool) -> Any:
    """Return how Keras puts rows and weights onto the devices of all nodes."""
    from keras import distribution

    if not is_model_parallel:
        return distribution.DataParallel(auto_shard_dataset=False)
    mesh = distribution.DeviceMesh((1, len(distribution.list_devices())), ("batch", "model"))
    layout = distribution.LayoutMap(mesh)
    layout[".*hidden/kernel"] = (None, "model")  # each node has some of the columns
    layout[".*hidden/bias"] = ("model",)
    layout[".*last/kernel"] = ("model", None)
    return distribution.ModelParallel(layout_map=layout, auto_shard_dataset=False)


def train(args: argparse.Namespace, ctx: sparkdl.NodeContext) -> float:
    """Train, and return the accuracy of the last epoch. Runs once in every node."""
    import keras  # its backend is JAX, because the framework is

    keras.distribution.set_distribution(distribution(args.model_parallel))
    keras.utils.set_random_seed(0)  # the same weights on all nodes
    layers = [
        keras.Input((64,)),
        keras.layers.Dense(128, activation="relu", name="hidden"),
        keras.layers.Dense(10, name="last"),
    ]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, weighted_metrics=["accuracy"])
    data = ctx.jax_batches(args.batch_size, x="image", y="label", shuffle=True).as_keras()
    history = model.fit(data, epochs=args.epochs, verbose=2 if ctx.is_chief else 0)
    return float(history.history["accuracy"][-1])


def main() -> None:
    """Feed the digits to nodes on this machine."""
    from sklearn.datasets import load_digits

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="rows that one node holds")
    parser.add_argument("--model-parallel", action="store_true", help="split the weights")
    args = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    pairs = zip((images / 16).tolist(), labels.tolist(), strict=True)
    rows = [{"image": image, "label": label} for image, label in pairs]
    with sparkdl.launch(
        None,
        train,
        args,
        args.nodes,
        framework="jax",
        executor="local",
        observe=sparkdl.Observe(log_to_driver=True),
    ) as cluster:
        cluster.feed(rows, epochs=args.epochs)
        accuracy = cluster.results()[0]
    print(f"Keras on JAX: training accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
