"""Lightning's trainer and Fabric on nodes, fed, interrupted, and beside one process alone."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparkdl.lightning
from sparkdl.core.errors import ConfigError
from sparkdl.core.options import Startup
from sparkdl.driver.options import Observe
from sparkdl.node.context import NodeContext
from tests.doubles.map_funs import hold_checkpoint
from tests.doubles.nodes import Lines, launch

pytestmark = [
    *(pytest.mark.torch, pytest.mark.timeout(300)),
    pytest.mark.skipif(
        not (find_spec("lightning") and find_spec("pytorch_lightning")),
        reason="PyTorch Lightning is not installed",
    ),
]

_SOON_S = 200.0
EPOCHS, BATCH, BATCHES, NODES = 3, 4, 5, 2
ABLE = ("checkpointing", "progress_bar", "model_summary")
QUIET: dict[str, Any] = {"logger": False, **{f"enable_{what}": False for what in ABLE}}


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
                os.kill(os.getpid(), signal.SIGKILL)
            return self._loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            loss = self._loss(batch)
            self.log("val_loss", loss, sync_dist=True)
            self.losses.append(float(loss))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)

    return Line()


def train(failure: int, ctx: NodeContext) -> dict[str, Any]:
    """Fit on the feeds; die at this step in the first generation, while a checkpoint is held up."""
    import lightning.pytorch as pl
    import torch

    torch.set_num_threads(1)
    model = _module(pl)
    model.fail_at = None if ctx.generation else failure
    hold_checkpoint(ctx, failure - 2)
    data = sparkdl.lightning.FeedDataModule(BATCH, x="x", y="y", validation="validation")
    checkpoint = sparkdl.lightning.Checkpoint(every_steps=3)
    print(f"goes on with {checkpoint.path.parent.name[:15] if checkpoint.path else None}")
    one: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "num_nodes": ctx.num_workers}
    one |= {"strategy": "ddp", "plugins": [sparkdl.lightning.Environment()]}
    trainer = pl.Trainer(max_epochs=EPOCHS, callbacks=[checkpoint], **one, **QUIET)
    trainer.fit(model, data, ckpt_path=checkpoint.path)
    assert ctx._checkpoints._in_flight is None, "the end of fit waits for the last"
    return {
        "steps": model.steps,
        "losses": model.losses,
        "weights": [p.detach().numpy() for p in model.parameters()],
        "expected": _undisturbed(),
        "epochs": trainer.current_epoch,
        "global_step": trainer.global_step,
    }


def _undisturbed() -> list[Any]:
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


@pytest.mark.smoke
def test_trainer_is_fed_and_takes_steps_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """On one node; on two it trains in tests/node/test_checkpoint_pairs_integration.py."""
    rows = [{"x": [0.3, 1.0], "y": 1.0}] * (BATCH * BATCHES)
    lines = Lines()
    options: dict[str, Any] = {"framework": "torch", "max_restarts": 2}
    options["observe"] = Observe(on_log=lines)
    options["startup"] = Startup(preload=["lightning.pytorch"])  # once, for both generations
    with launch(train, 2 * BATCHES + 1, 1, checkpoint_dir=str(tmp_path), **options) as cluster:
        validation = cluster.feed_async(rows[:16], epochs=EPOCHS, feed="validation")
        report = cluster.feed(rows, epochs=EPOCHS, timeout_s=_SOON_S)
        validation.result(_SOON_S)
        (found,) = cluster.results(_SOON_S)
    assert (report.rows_unused, report.rows_covered) == (0, 6 * BATCH)
    begun = [text for text in lines.of("worker:0") if text.startswith("goes on")]
    assert [text[-4:] for text in begun] == ["None", "0006"], "9 was held up, for two steps"
    assert len(found["losses"]) == 2 * 16 // BATCH
    assert found["steps"] == list(range(6, EPOCHS * BATCHES))
    assert found["epochs"] == EPOCHS
    for one, other in zip(found["weights"], found["expected"], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def share(folder: str, ctx: NodeContext) -> dict[str, Any]:
    """Train by Fabric, by the old package and on too few epochs; be refused."""
    import lightning.pytorch as pl
    import pytorch_lightning
    import torch
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    one: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "num_nodes": ctx.num_workers}
    one["plugins"] = [sparkdl.lightning.Environment()]
    for wrong in ({"devices": 2}, {"num_nodes": 1}):
        for kind in (Fabric, pl.Trainer, pytorch_lightning.Trainer):
            with pytest.raises(ConfigError, match=r"devices=1, num_nodes=2"):
                kind(**{**one, **wrong}, strategy="ddp")

    found: dict[str, Any] = {"expected": _undisturbed()}
    fabric = Fabric(**one, strategy="ddp")
    found["fabric"] = _loop(fabric, _module(pl).net)
    found["place"] = [fabric.global_rank, fabric.world_size, fabric.local_rank, fabric.node_rank]
    detected = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    found["detected"] = [detected.global_rank, detected.world_size, detected.local_rank]
    fsdp = ModelParallelStrategy(
        lambda net, mesh: fully_shard(net, mesh=mesh["data_parallel"]), NODES, 1
    )
    found["fsdp"] = _loop(Fabric(**one, strategy=fsdp), _module(pl).net)

    model = _module(pytorch_lightning)
    rows = TensorDataset(torch.tensor([[0.3, 1.0]] * NODES * BATCHES * BATCH), torch.ones(40))
    trainer = pytorch_lightning.Trainer(**QUIET, **one, strategy="ddp", max_epochs=EPOCHS)
    trainer.fit(model, DataLoader(rows, BATCH))
    found["old"] = [p.detach().numpy() for p in model.parameters()]
    found["sampler"] = type(trainer.train_dataloader.sampler).__name__

    model = _module(pl)
    trainer = pl.Trainer(**QUIET, **one, strategy="ddp", max_epochs=EPOCHS + 5)
    trainer.fit(model, sparkdl.lightning.FeedDataModule(BATCH, x="x", y="y"))
    found["fed"] = [p.detach().numpy() for p in model.parameters()]
    return found


def _loop(fabric: Any, net: Any) -> list[Any]:
    import torch
    from torch.distributed.tensor import DTensor

    fabric.launch()
    model = fabric.setup(net)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), 0.05, momentum=0.9))
    for _ in range(EPOCHS * BATCHES):
        optimizer.zero_grad()
        x, y = torch.tensor([[0.3, 1.0]] * BATCH), torch.ones(BATCH)
        fabric.backward(torch.nn.functional.mse_loss(model(x)[:, 0], y))
        optimizer.step()
    whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return [p.detach().numpy() for p in whole]


@pytest.mark.deep  # the trainer that goes on after a failure is the one that stays
def test_every_strategy_trains_as_one_process_does_and_wrong_numbers_are_refused() -> None:
    lines = Lines()
    rows = [{"x": [0.3, 1.0], "y": 1.0}] * (NODES * BATCH * BATCHES)
    with launch(share, "", NODES, framework="torch", observe=Observe(on_log=lines)) as cluster:
        cluster.feed(rows, epochs=EPOCHS, timeout_s=_SOON_S)
        results = cluster.results(_SOON_S)
    for rank, found in enumerate(results):
        assert found["place"] == [rank, NODES, 0, rank]
        assert found["detected"] == [rank, NODES, rank]
        assert found["sampler"] == "DistributedSampler"
        for way in ("fabric", "fsdp", "old", "fed"):
            for one, other in zip(found[way], found["expected"], strict=True):
                np.testing.assert_allclose(one, other, atol=1e-6)
    assert [line for line in lines.of("worker:0") if "The feed has ended" in line]
