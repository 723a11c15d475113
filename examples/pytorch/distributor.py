"""PyTorch: `TorchDistributor` with pyspark's API, plus a feed and restarts; handwritten digits.

    spark-submit examples/pytorch/distributor.py

`train` uses sparkdl only to read its rows. A function that reads its data without a feed runs
unchanged: only the import of the distributor changes.

Data: the 1,797 images of scikit-learn's `load_digits`. Prints `TorchDistributor: accuracy`, above
0.85. Takes about 30 seconds on two cores.
"""

from __future__ import annotations

import argparse

import sparkdl
from sparkdl.node.context import current


def train(epochs: int, learning_rate: float = 0.01) -> tuple[object, list[float]]:
    """Train on the fed rows; return the model and the accuracy of each epoch."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), learning_rate)
    data = current().torch_dataset(32, x="image", y="label", shuffle=True)
    accuracies = []
    for epoch in range(epochs):
        right = rows = 0
        for images, labels in data:
            scores = model(images)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(scores, labels).backward()
            optimizer.step()
            right, rows = right + int((scores.argmax(1) == labels).sum()), rows + len(labels)
        accuracies.append(right / rows)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1} of {epochs}: accuracy {accuracies[-1]:.2f}")
    dist.destroy_process_group()
    return net, accuracies


def main() -> None:
    """Train in the Spark session of spark-submit; print the returned model's size and accuracy."""
    from pyspark.sql import SparkSession
    from sklearn.datasets import load_digits

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    spark = SparkSession.builder.appName("sparkdl TorchDistributor").getOrCreate()
    try:
        images, labels = load_digits(return_X_y=True)
        rows = zip((images / 16).tolist(), labels.tolist(), strict=True)
        frame = spark.createDataFrame(rows, "image array<float>, label long").repartition(4)
        distributor = sparkdl.TorchDistributor(
            args.processes,
            local_mode=False,
            use_gpu=False,
            feed=frame,
            epochs=args.epochs,
            max_restarts=1,
        )
        net, accuracies = distributor.run(train, args.epochs, learning_rate=0.01)
        print(f"parameters of {type(net).__name__}: {sum(p.numel() for p in net.parameters())}")
        print(f"TorchDistributor: accuracy {accuracies[-1]:.2f}")
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
