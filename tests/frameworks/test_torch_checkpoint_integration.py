"""A training that was interrupted equals one that was not: replicated, and sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
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


@pytest.mark.deep
def test_interrupted_training_equals_an_undisturbed_one(tmp_path: Path) -> None:
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


GLOBAL_BATCH = 12
"""Rows of a step on all nodes together."""


def _sharded_step(model: Any, optimizer: Any, step: int, rank: int, size: int) -> None:
    import torch

    rows = torch.Generator().manual_seed(step)
    x = torch.randn(GLOBAL_BATCH, 6, generator=rows)[rank::size]
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def train_sharded(until: int, ctx: NodeContext) -> dict[str, Any]:
    """Train with FSDP2 to step `until`, saving shards each two steps; fail once, at step 5."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")

    def begin() -> tuple[Any, Any]:
        torch.manual_seed(1)
        net = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))
        return net, torch.optim.AdamW

    net, kind = begin()
    model = fully_shard(net)
    optimizer = kind(model.parameters(), 0.05)
    last = ctx.last_checkpoint
    if last:
        found = get_state_dict(model, optimizer)
        dcp.load({"model": found[0], "optimizer": found[1]}, checkpoint_id=last.folder)
        set_state_dict(model, optimizer, model_state_dict=found[0], optim_state_dict=found[1])
    for step in range(last.step if last else 0, until):
        _sharded_step(model, optimizer, step, ctx.rank, ctx.num_workers)
        if step == 4 and not ctx.generation:
            raise RuntimeError("interrupted")
        if step % 2:
            with ctx.checkpoint(step + 1) as folder:
                now = get_state_dict(model, optimizer)
                dcp.save({"model": now[0], "optimizer": now[1]}, checkpoint_id=folder)
    weights = [p.full_tensor().detach().numpy() for p in model.parameters()]
    alone, kind = begin()
    optimizer = kind(alone.parameters(), 0.05)
    for step in range(until):
        _sharded_step(alone, optimizer, step, 0, 1)
    expected = [p.detach().numpy() for p in alone.parameters()]
    return {"weights": weights, "expected": expected, "resumed": last and last.step}


def test_sharded_training_goes_on_after_a_failure_and_on_another_number_of_nodes(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"framework": "torch", "input_mode": "own"}
    for until, nodes, resumed in ((6, 2, 4), (10, 1, 6)):
        with launch(
            train_sharded,
            *(until, nodes),
            checkpoint_dir=str(tmp_path),
            max_restarts=nodes - 1,
            **options,
        ) as cluster:
            results = cluster.results(_SOON_S)
        for found in results:
            assert found["resumed"] == resumed
            for one, other in zip(found["weights"], found["expected"], strict=True):
                np.testing.assert_allclose(one, other, atol=1e-5)
