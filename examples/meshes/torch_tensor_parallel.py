"""Data and tensor parallel with PyTorch: FSDP2 along one axis, split layers along the other.

    python examples/meshes/torch_tensor_parallel.py --data 2 --model 2

Runs on this machine, without Spark: pass a SparkSession to `launch`, and leave `executor` out, to
run it on a cluster. Nodes that hold parts of the same layers get the same rows.

Data: the 1,797 images of scikit-learn's `load_digits`. Prints the loss `at first` and `at last`,
the last below 0.5. Takes about 25 seconds on two cores.
"""

from __future__ import annotations

import argparse

import sparkdl

EPOCHS, BATCH = 10, 64


def train(args: argparse.Namespace, ctx: sparkdl.NodeContext) -> list[float]:
    """Train, and return the loss of each epoch. Runs once in every node."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from torch.utils.data import DataLoader

    mesh = ctx.mesh(data=args.data, model=args.model)  # a DeviceMesh, and its process groups
    torch.manual_seed(0)  # the same weights on all nodes
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    layers = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["model"], layers)
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    data = ctx.torch_dataset(BATCH, x="image", y="label", mesh=mesh, tail="drop", shuffle=True)
    losses = []
    for _ in range(EPOCHS):
        total, steps = 0.0, 0
        for images, labels in DataLoader(data, batch_size=None):
            loss = torch.nn.functional.cross_entropy(model(images.float()), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, steps = total + loss.item(), steps + 1
        losses.append(total / steps)
    held = tuple(model[0].weight.to_local().shape)
    print(f"{steps} steps of {len(images)} rows; this node holds {held} of (128, 64)")
    return losses


def main() -> None:
    """Feed the digits to nodes on this machine."""
    from sklearn.datasets import load_digits

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=int, default=2, help="groups that get different rows")
    parser.add_argument("--model", type=int, default=2, help="nodes that split each layer")
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
        framework="torch",
        executor="local",
        observe=sparkdl.Observe(log_to_driver=True),
    ) as cluster:
        cluster.feed(digits, epochs=EPOCHS)
        losses = cluster.results()[0]
    print(f"Data and tensor parallel: loss {losses[0]:.2f} at first, at last {losses[-1]:.2f}")


if __name__ == "__main__":
    main()
