"""JAX: data-parallel training on handwritten digits, on several nodes, fed from a DataFrame.

    spark-submit examples/jax/digits.py

When `train` starts, the nodes are connected: `jax.devices()` lists the devices of all nodes. The
batches are global arrays, so the step is written as for one device.

Data: the 1,797 images of scikit-learn's `load_digits`. Prints `JAX: first-epoch loss …, last-epoch
loss …`, the last below 1. Takes about 30 seconds on two cores.
"""

from __future__ import annotations

import argparse
from typing import Any

import sparkdl


def train(args: argparse.Namespace, ctx: sparkdl.NodeContext) -> list[float]:
    """Train, and return the loss of each epoch. Runs once in every node."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    keys = jax.random.split(jax.random.key(0), 2)  # the same on all nodes
    weights = {
        "hidden": jax.random.normal(keys[0], (64, 64)) / 8,
        "bias": jnp.zeros(64),
        "last": jax.random.normal(keys[1], (64, 10)) / 8,
    }

    def loss_of(weights: Any, images: Any, labels: Any, weight: Any) -> Any:
        logits = jax.nn.relu(images @ weights["hidden"] + weights["bias"]) @ weights["last"]
        each = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]
        return jnp.sum(each * weight) / jnp.sum(weight)  # padding rows have weight 0

    @jax.jit
    def step(weights: Any, images: Any, labels: Any, weight: Any) -> Any:
        loss, slopes = jax.value_and_grad(loss_of)(weights, images, labels, weight)
        return jax.tree.map(lambda w, s: w - args.rate * s, weights, slopes), loss

    mesh = ctx.mesh(data=-1)  # all devices of all nodes
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    data = ctx.jax_batches(args.batch_size, "image", "label", sharding=sharding, shuffle=True)
    losses = []
    for epoch in range(args.epochs):
        found = []
        for images, labels, weight in data:
            weights, loss = step(weights, images, labels, weight)
            found.append(loss)
        losses.append(float(sum(found)) / len(found))
        if ctx.is_chief:
            print(f"epoch {epoch + 1}/{args.epochs}: {len(found)} steps, loss {losses[-1]:.3f}")
    return losses


def main() -> None:
    """Feed the nodes from the Spark session of spark-submit."""
    from pyspark.sql import SparkSession
    from sklearn.datasets import load_digits

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="per node")
    parser.add_argument("--rate", type=float, default=0.2)
    args = parser.parse_args()

    spark = SparkSession.builder.appName("sparkdl JAX").getOrCreate()
    try:
        images, labels = load_digits(return_X_y=True)
        rows = zip((images / 16).tolist(), labels.tolist(), strict=True)
        frame = spark.createDataFrame(rows, "image array<float>, label int").repartition(4)
        with sparkdl.launch(
            spark,
            train,
            args,
            args.nodes,
            framework="jax",
            observe=sparkdl.Observe(log_to_driver=True),
        ) as cluster:
            cluster.feed(frame, epochs=args.epochs)
            losses = cluster.results()[0]
        print(f"JAX: first-epoch loss {losses[0]:.2f}, last-epoch loss {losses[-1]:.2f}")
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
