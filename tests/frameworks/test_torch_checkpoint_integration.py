"""A training with DistributedDataParallel that was interrupted equals one that was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparkdl.node.context import NodeContext
from tests.doubles.nodes import launch

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

_SOON_S = 120.0
EPOCHS, BATCH, BATCHES = 3, 4, 5


def train(args: None, ctx: NodeContext) -> dict[str, Any]:
    """Train on the feed, failing once in the middle of the second epoch; and on one row, never."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.utils.data import DataLoader

    torch.distributed.init_process_group("gloo")

    def begin() -> tuple[Any, Any]:
        torch.manual_seed(1)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        return model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    def take_step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x.float())[:, 0], y.float()).backward()
        optimizer.step()

    model, optimizer = begin()
    last = ctx.last_checkpoint
    step, epoch, batches = last.step if last else 0, 0, 0
    if last:
        state = model.module.state_dict()
        dcp.load({"model": state}, checkpoint_id=last.folder)
        model.module.load_state_dict(state)
        saved = torch.load(last.folder / "rest.pt", weights_only=True)
        optimizer.load_state_dict(saved["optimizer"])
        epoch = saved["epoch"]
    data = ctx.torch_dataset(BATCH, x="x", y="y")
    while epoch < EPOCHS:
        for x, y in DataLoader(data, batch_size=None):
            take_step(model, optimizer, x, y)
            step, batches = step + 1, batches + 1
            if step == BATCHES + 3 and not ctx.generation:
                raise RuntimeError("interrupted")
            if step % 3 == 0:
                with ctx.checkpoint(step, batches=batches) as folder:
                    dcp.save({"model": model.module.state_dict()}, checkpoint_id=folder)
                    if ctx.is_chief:
                        rest = {"optimizer": optimizer.state_dict(), "epoch": epoch}
                        torch.save(rest, folder / "rest.pt")
        epoch += 1
    undisturbed, optimizer = begin()
    for _ in range(EPOCHS * BATCHES):
        take_step(undisturbed, optimizer, x, y)
    weights = [
        [float(v) for p in m.parameters() for v in p.flatten()] for m in (model, undisturbed)
    ]
    return {"weights": weights, "resumed": last and last.step, "batches": batches, "step": step}


def test_interrupted_training_equals_an_undisturbed_one(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    rows = [{"x": [0.3, 1.0], "y": 1.0}] * (2 * BATCH * BATCHES)
    options: dict[str, Any] = {"framework": "torch", "max_restarts": 1}
    with launch(train, checkpoint_dir=str(tmp_path), **options) as cluster:
        report = cluster.feed(rows, epochs=EPOCHS, timeout_s=_SOON_S)
        results = cluster.results(_SOON_S)
    assert report.rows_unused == 0
    for found in results:
        assert found["resumed"] == 6, "the failure was at the eighth step"
        assert found["batches"] == EPOCHS * BATCHES - 6
        assert found["step"] == EPOCHS * BATCHES
        interrupted, undisturbed = found["weights"]
        assert interrupted == pytest.approx(undisturbed, abs=1e-5)
