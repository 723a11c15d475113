"""A Horovod program for PyTorch on handwritten digits; only its imports have changed.

    spark-submit examples/horovod/torch_digits.py

`hvd` is `sparkdl.horovod.torch`. Each process reads its share of the data; gradients are averaged
during the backward pass.

Data: the 1,797 images of scikit-learn's `load_digits`. Prints `Horovod: test accuracy`, above 0.8.
Takes about 25 seconds on two cores.
"""

from __future__ import annotations

import argparse

import sparkdl.horovod.spark


def train(args: argparse.Namespace) -> float:
    """Train, and return the accuracy over all test images. Runs once in every process."""
    import torch
    from sklearn.datasets import load_digits
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    import sparkdl.horovod.torch as hvd

    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    data = TensorDataset(x.float().view(-1, 1, 8, 8) / 16, y)
    train_data, test_data = torch.utils.data.random_split(data, [1437, 360])
    sampler = DistributedSampler(train_data, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(train_data, batch_size=args.batch_size, sampler=sampler)

    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16 * 36, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        average = hvd.allreduce(loss.detach(), name="loss").item()
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}/{args.epochs}: loss {average:.3f}")

    images, labels = next(iter(DataLoader(test_data, batch_size=len(test_data))))
    right = (model(images).argmax(1) == labels)[hvd.rank() :: hvd.size()].float()
    return float(hvd.allgather(right).mean())  # the shares may differ in length


def main() -> None:
    """Train in the Spark session of spark-submit."""
    from pyspark.sql import SparkSession

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-proc", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--lr", type=float, default=0.02, help="per process")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in 16 bits")
    args = parser.parse_args()

    spark = SparkSession.builder.appName("sparkdl Horovod").getOrCreate()
    try:
        accuracies = sparkdl.horovod.spark.run(train, args=(args,), num_proc=args.num_proc)
        print(f"Horovod: test accuracy {accuracies[0]:.3f}")
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
