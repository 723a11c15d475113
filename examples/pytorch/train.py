"""PyTorch: DistributedDataParallel on two nodes, fed from a DataFrame; it survives a kill.

    spark-submit examples/pytorch/train.py --die-at 60

With `--die-at`, the chief kills itself at that step. Both nodes then resume from the last
checkpoint, with exactly the rows that it does not cover.

Data: the 1,797 images of scikit-learn's `load_digits`. Prints `resumed at step …` after a kill, and
`PyTorch: first-epoch loss …, last-epoch loss …`, the last below 1. Takes 25 seconds on two cores.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile

import sparkdl

EVERY_STEPS = 25


def train(args: argparse.Namespace, ctx: sparkdl.NodeContext) -> list[float]:
    """Train, and return the loss of each epoch. Runs once in every node, again after a failure."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    dist.init_process_group()  # the environment has the addresses of the other nodes
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    step, losses = 0, []
    if last := ctx.last_checkpoint:
        saved = torch.load(last.folder / "state.pt", weights_only=True)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        step, losses = last.step, saved["losses"]
        print(f"resumed at step {step}")

    # The feed forms the batches. `tail="drop"` carries rows of a partial batch to the next epoch.
    data = ctx.torch_dataset(args.batch_size, x="image", y="label", tail="drop", shuffle=True)
    while ctx.has_epoch():
        total, steps = 0.0, 0
        for images, labels in DataLoader(data, batch_size=None):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, steps, step = total + loss.item(), steps + 1, step + 1
            if step % EVERY_STEPS == 0:
                with ctx.checkpoint(step) as folder:
                    if ctx.is_chief:
                        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
                        torch.save({**state, "losses": losses}, folder / "state.pt")
            if step == args.die_at and ctx.is_chief and not ctx.restarts:
                os.kill(os.getpid(), signal.SIGKILL)
        if steps:
            losses.append(total / steps)
        if ctx.is_chief and steps:
            print(f"epoch {len(losses)}: {steps} steps, loss {losses[-1]:.3f}", flush=True)
    dist.destroy_process_group()
    return losses


def main() -> None:
    """Feed the nodes from the Spark session of spark-submit."""
    from pyspark.sql import SparkSession
    from sklearn.datasets import load_digits

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="per node")
    parser.add_argument("--die-at", type=int, default=0, help="step of the kill; 0: never")
    parser.add_argument("--checkpoints", help="folder or URL that all nodes share")
    args = parser.parse_args()

    spark = SparkSession.builder.appName("sparkdl PyTorch").getOrCreate()
    try:
        images, labels = load_digits(return_X_y=True)
        rows = zip((images / 16).tolist(), labels.tolist(), strict=True)
        frame = spark.createDataFrame(rows, "image array<float>, label long").repartition(4)
        with (
            tempfile.TemporaryDirectory() as folder,
            sparkdl.launch(
                spark,
                train,
                args,
                args.nodes,
                framework="torch",
                max_restarts=1,
                checkpoint_dir=args.checkpoints or folder,
                observe=sparkdl.Observe(log_to_driver=True),
            ) as cluster,
        ):
            cluster.feed(frame, epochs=args.epochs)
            losses = cluster.results()[0]
        print(f"PyTorch: first-epoch loss {losses[0]:.2f}, last-epoch loss {losses[-1]:.2f}")
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
