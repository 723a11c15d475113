"""PyTorch Lightning: a Trainer on several fed nodes, with checkpoints; handwritten digits.

    python examples/lightning/train.py

Runs on this machine, without Spark. On a cluster, pass a SparkSession to `launch`, omit `executor`,
and feed DataFrames. The LightningModule needs no change; an epoch of the trainer is an epoch of the
feed. After a failure, training resumes with the rows that the checkpoint does not cover.

Data: the 1,797 images of scikit-learn's `load_digits`. Prints `Lightning: validation accuracy`,
above 0.8. Takes about 25 seconds on two cores.
"""

from __future__ import annotations

import argparse
from typing import Any

import sparkdl


def train(args: argparse.Namespace, ctx: sparkdl.NodeContext) -> float:
    """Fit on the fed rows; return the validation accuracy. Runs once in every node."""
    import lightning.pytorch as pl
    import torch
    from torch.nn.functional import cross_entropy

    from sparkdl.lightning import Checkpoint, Environment, FeedDataModule

    class Digits(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            layers = (torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
            self.net = torch.nn.Sequential(*layers)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            images, labels = batch
            return cross_entropy(self.net(images.float()), labels)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            images, labels = batch
            right = (self.net(images.float()).argmax(1) == labels).float().mean()
            self.log("accuracy", right, sync_dist=True, batch_size=len(labels))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 3e-3)

    torch.set_num_threads(1)
    pl.seed_everything(0)
    checkpoint = Checkpoint(every_epochs=2)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=ctx.num_workers,
        strategy="ddp",
        plugins=[Environment()],
        callbacks=[checkpoint],
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,  # Lightning's checkpoints do not record the rows
        enable_progress_bar=False,
    )
    data = FeedDataModule(32, x="image", y="label", validation="validation", shuffle=True)
    trainer.fit(Digits(), data, ckpt_path=checkpoint.path)
    return float(trainer.callback_metrics["accuracy"])


def main() -> None:
    """Feed the digits to nodes on this machine."""
    from sklearn.datasets import load_digits

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--checkpoints", default="out/lightning", help="folder all nodes share")
    args = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    pairs = zip((images / 16).tolist(), labels.tolist(), strict=True)
    rows = [{"image": image, "label": label} for image, label in pairs]
    with sparkdl.launch(
        None,
        train,
        args,
        args.nodes,
        framework="torch",
        executor="local",
        checkpoint_dir=args.checkpoints,
        max_restarts=1,
    ) as cluster:
        cluster.feed_async(rows[1400:], epochs=args.epochs, feed="validation")
        cluster.feed(rows[:1400], epochs=args.epochs)
        print(f"Lightning: validation accuracy {cluster.results()[0]:.2f}")


if __name__ == "__main__":
    main()
