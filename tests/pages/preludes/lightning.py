"""The module of the page, its rows, and a function of nodes around Fabric.

Runs in: the driver of a page's program
"""

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric

from sparkdl.lightning import Environment

training, validation = df, df.limit(16)


class MyModule(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(64, 10)

    def loss(self, batch):
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.last(images), labels)

    def training_step(self, batch, index):
        return self.loss(batch)

    def validation_step(self, batch, index):
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=len(batch[0]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


# block: PyTorch Lightning


def train(args, ctx):
    # block: Environment
    return fabric.global_rank, fabric.world_size


assert sparkdl.run(spark, train, nodes=2, framework="torch") == [(0, 2), (1, 2)]
