"""Data and model parallel with JAX: four nodes hold two copies of one model, half of it each.

    python examples/meshes/jax_hybrid.py --data 2 --model 2

Runs on this machine, without Spark: pass a SparkSession to `launch`, and leave `executor` out, to
run it on a cluster. Each row goes to one copy of the model, to all nodes that hold it. JAX puts in
what the nodes have to tell each other.

Data: the 1,797 images of scikit-learn's `load_digits`. Prints the loss `at first` and `at last`,
the last below 0.5. Takes about 25 seconds on two cores.
"""

from __future__ import annotations

import argparse
from typing import Any

import sparkdl

EPOCHS, BATCH, RATE = 10, 64, 0.2


def train(args: argparse.Namespace, ctx: sparkdl.NodeContext) -> list[float]:
    """Train, and return the loss of each epoch. Runs once in every node."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = ctx.mesh(data=args.data, model=args.model)
    keys = jax.random.split(jax.random.key(0), 2)
    shapes = {"hidden": (64, 128), "last": (128, 10)}
    specs = {"hidden": P(None, "model"), "last": P("model", None)}
    weights = {
        name: jax.device_put(
            jax.random.normal(key, shapes[name]) / 8, NamedSharding(mesh, specs[name])
        )
        for name, key in zip(shapes, keys, strict=True)
    }

    def loss_of(weights: Any, images: Any, labels: Any, weight: Any) -> Any:
        logits = jax.nn.relu(images @ weights["hidden"]) @ weights["last"]
        each = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]
        return jnp.sum(each * weight) / jnp.sum(weight)

    @jax.jit
    def step(weights: Any, images: Any, labels: Any, weight: Any) -> Any:
        loss, slopes = jax.value_and_grad(loss_of)(weights, images, labels, weight)
        return jax.tree.map(lambda w, s: w - RATE * s, weights, slopes), loss

    rows = NamedSharding(mesh, P("data"))  # and on all nodes along the other axis the same
    losses = []
    for _ in range(EPOCHS):
        found = []
        for images, labels, weight in ctx.jax_batches(BATCH, "image", "label", sharding=rows):
            weights, loss = step(weights, images, labels, weight)
            found.append(loss)
        losses.append(float(sum(found)) / len(found))
    held = weights["hidden"].addressable_shards[0].data.shape
    print(f"{len(found)} steps of {len(images)} rows; this node holds {held} of {shapes['hidden']}")
    return losses


def main() -> None:
    """Feed the digits to nodes on this machine."""
    from sklearn.datasets import load_digits

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=int, default=2, help="copies of the model")
    parser.add_argument("--model", type=int, default=2, help="nodes that share one copy")
    args = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    pairs = zip((images / 16).tolist(), labels.tolist(), strict=True)
    digits = [{"image": image, "label": label} for image, label in pairs]
    nodes = args.data * args.model
    with sparkdl.launch(
        None,
        train,
        args,
        nodes,
        framework="jax",
        executor="local",
        observe=sparkdl.Observe(log_to_driver=True),
    ) as cluster:
        cluster.feed(digits, epochs=EPOCHS)
        losses = cluster.results()[0]
    print(f"Data and model parallel: loss {losses[0]:.2f} at first, at last {losses[-1]:.2f}")


if __name__ == "__main__":
    main()
