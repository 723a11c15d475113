"""A sharded training that was interrupted equals one that was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkdl.core.options import Feeding
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import launch

pytestmark = [pytest.mark.torch, pytest.mark.deep, pytest.mark.timeout(300)]

_SOON_S = 120.0
EPOCHS, BATCH, BATCHES = 3, 4, 5


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
    options: dict[str, Any] = {"framework": "torch", "feeding": Feeding(fed=False)}
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
