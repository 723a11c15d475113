"""PyTorch Lightning: a Trainer on several nodes, fed from DataFrames, with checkpoints; digits.

    spark-submit examples/lightning/train.py

The module is what it would be anywhere. The trainer gets to know the cluster by a plugin; an epoch
of the trainer is one of the feed. After a failure it goes on with the rows that it has not seen.
"""

from __future__ import annotations

import argparse
from typing import Any

import sparkdl


def train(args: argparse.Namespace, ctx: sparkdl.NodeContext) -> float:
    """Fit on the rows that are fed; return the accuracy of the validation."""
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
            return cross_entropy(self.net(images), labels)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            images, labels = batch
            right = (self.net(images).argmax(1) == labels).float().mean()
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
        enable_checkpointing=False,  # of Lightning's own, beside the rows
        enable_progress_bar=False,
    )
    data = FeedDataModule(32, x="image", y="label", validation="validation", shuffle=True)
    trainer.fit(Digits(), data, ckpt_path=checkpoint.path)
    return float(trainer.callback_metrics["accuracy"])


def main() -> None:
    """Feed the nodes on the session that spark-submit set up."""
    from pyspark.sql import SparkSession
    from sklearn.datasets import load_digits

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--checkpoints", default="out/lightning", help="folder that all reach")
    args = parser.parse_args()

    spark = SparkSession.builder.appName("sparkdl Lightning").getOrCreate()
    try:
        images, labels = load_digits(return_X_y=True)
        rows = zip((images / 16).tolist(), labels.tolist(), strict=True)
        frame = spark.createDataFrame(rows, "image array<float>, label long")
        training, validation = frame.repartition(4).randomSplit([0.8, 0.2], seed=1)
        with sparkdl.launch(
            spark,
            train,
            args,
            args.nodes,
            framework="torch",
            checkpoint_dir=args.checkpoints,
            max_restarts=1,
        ) as cluster:
            cluster.feed_async(validation, epochs=args.epochs, name="validation")
            cluster.feed(training, epochs=args.epochs)
            print(f"Lightning: validation accuracy {cluster.results()[0]:.2f}")
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
