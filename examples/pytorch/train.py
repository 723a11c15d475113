"""PyTorch: DistributedDataParallel on several nodes, fed from a DataFrame.

    spark-submit examples/pytorch/train.py

The loop is what it would be anywhere; the data set is the feed. An epoch ends on all nodes after
the same step, so that no node waits for another for ever.

Data: the 1,797 images of scikit-learn's `load_digits`. Prints `PyTorch: loss … at first, at last
…`, the last below 1. Takes about 25 seconds on two cores.
"""

from __future__ import annotations

import argparse

import sparkdl


def train(args: argparse.Namespace, ctx: sparkdl.NodeContext) -> list[float]:
    """Train, and return the loss of each epoch. Runs once in every node."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    dist.init_process_group()  # where the others are is in the environment already
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    # Batches come ready made, full ones alone: what is left over comes first in the next epoch.
    data = ctx.torch_dataset(args.batch_size, x="image", y="label", tail="drop", shuffle=True)
    loader = DataLoader(data, batch_size=None)
    losses = []
    for epoch in range(args.epochs):
        total, steps = 0.0, 0
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, steps = total + loss.item(), steps + 1
        losses.append(total / steps)
        if ctx.is_chief:
            print(f"epoch {epoch + 1}/{args.epochs}: {steps} steps, loss {losses[-1]:.3f}")
    dist.destroy_process_group()
    return losses


def main() -> None:
    """Feed the nodes on the session that spark-submit set up."""
    from pyspark.sql import SparkSession
    from sklearn.datasets import load_digits

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="per node")
    args = parser.parse_args()

    spark = SparkSession.builder.appName("sparkdl PyTorch").getOrCreate()
    try:
        images, labels = load_digits(return_X_y=True)
        rows = zip((images / 16).tolist(), labels.tolist(), strict=True)
        frame = spark.createDataFrame(rows, "image array<float>, label long").repartition(4)
        with sparkdl.launch(
            spark,
            train,
            args,
            args.nodes,
            framework="torch",
            observe=sparkdl.Observe(log_to_driver=True),
        ) as cluster:
            cluster.feed(frame, epochs=args.epochs)
            losses = cluster.results()[0]
        print(f"PyTorch: loss {losses[0]:.2f} at first, at last {losses[-1]:.2f}")
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
