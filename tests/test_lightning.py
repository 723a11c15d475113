"""Lightning's trainer and Fabric on nodes, fed, interrupted, and beside one process alone."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparkdl.lightning
from sparkdl.core.errors import ConfigError
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import launch

pytestmark = [
    *(pytest.mark.torch, pytest.mark.timeout(300)),
    pytest.mark.skipif(
        not (find_spec("lightning") and find_spec("pytorch_lightning")),
        reason="PyTorch Lightning is not installed",
    ),
]

_SOON_S = 200.0
EPOCHS, BATCH, BATCHES, NODES = 3, 4, 5, 2
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def _module(package: Any) -> Any:
    """Return a model of a line, and what it sees, for `lightning.pytorch` or its old name."""
    import torch

    class Line(package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.net = torch.nn.Linear(2, 1)
            self.steps: list[int] = []
            self.losses: list[float] = []
            self.fail_at: int | None = None

        def _loss(self, batch: Any) -> Any:
            x, y = batch
            return torch.nn.functional.mse_loss(self.net(x.float())[:, 0], y.float())

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.steps.append(self.global_step)
            if self.global_step == self.fail_at:
                raise RuntimeError("interrupted")
            return self._loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            loss = self._loss(batch)
            self.log("val_loss", loss, sync_dist=True)
            self.losses.append(float(loss))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)

    return Line()


def train(folder: str, ctx: NodeContext) -> dict[str, Any]:
    """Fit on the feeds, failing once in the middle of the second epoch."""
    import lightning.pytorch as pl
    import torch

    torch.set_num_threads(1)
    model = _module(pl)
    model.fail_at = None if ctx.generation else BATCHES + 2
    data = sparkdl.lightning.FeedDataModule(
        BATCH, x="x", y="y", validation="validation", rows=NODES * BATCH * BATCHES
    )
    checkpoint = sparkdl.lightning.Checkpoint(every_steps=3)
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        devices=1,
        num_nodes=ctx.num_workers,
        strategy="ddp",
        plugins=[sparkdl.lightning.Environment()],
        callbacks=[checkpoint],
        **QUIET,
    )
    trainer.fit(model, data, ckpt_path=checkpoint.path)
    return {
        "steps": model.steps,
        "losses": model.losses,
        "weights": [p.detach().numpy() for p in model.parameters()],
        "expected": _undisturbed(model),
        "epochs": trainer.current_epoch,
        "sampler": type(trainer.train_dataloader.sampler).__name__,
        "per_epoch": data.steps_per_epoch,
        "global_step": trainer.global_step,
    }


def _undisturbed(trained: Any) -> list[Any]:
    import torch

    torch.manual_seed(1)
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    x, y = torch.tensor([[0.3, 1.0]] * BATCH), torch.ones(BATCH)
    for _ in range(EPOCHS * BATCHES):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x)[:, 0], y).backward()
        optimizer.step()
    return [p.detach().numpy() for p in net.parameters()]


def test_trainer_is_fed_and_goes_on_after_a_failure(tmp_path: Path) -> None:
    rows = [{"x": [0.3, 1.0], "y": 1.0}] * (NODES * BATCH * BATCHES)
    options: dict[str, Any] = {"framework": "torch", "max_restarts": 1}
    with launch(train, "", NODES, checkpoint_dir=str(tmp_path), **options) as cluster:
        validation = cluster.feed_async(rows[:16], epochs=EPOCHS, name="validation")
        report = cluster.feed(rows, epochs=EPOCHS, timeout_s=_SOON_S)
        validation.result(_SOON_S)
        results = cluster.results(_SOON_S)
    assert report.rows_unused == 0
    for found in results:
        print(found["losses"])
        assert found["sampler"] != "DistributedSampler"
        assert found["per_epoch"] == BATCHES
        assert found["steps"] == list(range(6, EPOCHS * BATCHES)), "the failure was at step 7"
        assert found["epochs"] == EPOCHS
        for one, other in zip(found["weights"], found["expected"], strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)


def share(folder: str, ctx: NodeContext) -> dict[str, Any]:
    """Train by Fabric, by the old package and by FSDP2; and be refused."""
    import lightning.pytorch as pl
    import pytorch_lightning
    import torch
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    where: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "num_nodes": ctx.num_workers}
    ours: dict[str, Any] = {"plugins": [sparkdl.lightning.Environment()]}
    refused = []
    for wrong in ({"devices": 2}, {"num_nodes": 1}):
        for kind in (Fabric, pl.Trainer, pytorch_lightning.Trainer):
            with pytest.raises(ConfigError, match=r"devices=1, num_nodes=2") as raised:
                options = QUIET if "Trainer" in kind.__name__ else {}
                kind(**{**where, **options, **wrong}, strategy="ddp", **ours).strategy.world_size
            refused.append(str(raised.value))
    x, y = torch.tensor([[0.3, 1.0]] * BATCH), torch.ones(BATCH)

    def loop(fabric: Any, model: Any, optimizer: Any) -> list[Any]:
        model, optimizer = fabric.setup(model, optimizer)
        for _ in range(EPOCHS * BATCHES):
            optimizer.zero_grad()
            fabric.backward(torch.nn.functional.mse_loss(model(x)[:, 0], y))
            optimizer.step()
        return [_whole(p) for p in model.parameters()]

    found: dict[str, Any] = {"refused": refused}
    fabric = Fabric(**where, strategy="ddp", **ours)
    fabric.launch()
    net = _module(pl).net
    found["fabric"] = loop(fabric, net, torch.optim.SGD(net.parameters(), 0.05, momentum=0.9))
    found["place"] = [fabric.global_rank, fabric.world_size, fabric.local_rank, fabric.node_rank]

    model = _module(pytorch_lightning)
    rows = TensorDataset(*[torch.cat([part] * NODES * BATCHES) for part in (x, y)])
    trainer = pytorch_lightning.Trainer(
        **{**QUIET, **where, **ours}, strategy="ddp", max_epochs=EPOCHS
    )
    trainer.fit(model, DataLoader(rows, BATCH))
    found["trainer"] = [p.detach().numpy() for p in model.parameters()]
    found["sampler"] = type(trainer.train_dataloader.sampler).__name__
    found["expected"] = _undisturbed(model)
    return found


def _whole(parameter: Any) -> Any:
    from torch.distributed.tensor import DTensor

    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return whole.detach().numpy()


def test_fabric_and_the_old_package_train_on_nodes_and_wrong_numbers_are_refused() -> None:
    with launch(share, "", NODES, framework="torch", input_mode="own") as cluster:
        results = cluster.results(_SOON_S)
    for rank, found in enumerate(results):
        print(found["refused"])
        assert found["place"] == [rank, NODES, 0, rank]
        assert found["sampler"] == "DistributedSampler"
        for way in ("fabric", "trainer"):
            for one, other in zip(found[way], found["expected"], strict=True):
                np.testing.assert_allclose(one, other, atol=1e-6)
