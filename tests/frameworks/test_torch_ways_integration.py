"""A pipeline of torch.distributed on two nodes, beside one process alone.

FSDP, tensor parallel and RPC are in the examples.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from sparkdl.core.options import Feeding
from sparkdl.driver.options import Observe
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import Lines, launch

pytestmark = [pytest.mark.torch, pytest.mark.deep, pytest.mark.timeout(300)]

_SOON_S = 120.0
STEPS, BATCH, SIZE = 4, 8, 2


def _net() -> Any:
    import torch

    torch.manual_seed(0)
    layers = (torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
    return torch.nn.Sequential(*layers)


def _data(step: int) -> tuple[Any, Any]:
    """Return the step's rows for all nodes together."""
    import torch

    random = torch.Generator().manual_seed(step)
    rows = SIZE * BATCH
    return torch.rand(rows, 16, generator=random), torch.randint(10, (rows,), generator=random)


def _alone() -> list[Any]:
    """Train on all rows; return the parameters."""
    import torch

    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), 0.5, momentum=0.9)
    for step in range(STEPS):
        x, y = _data(step)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return [p.detach().numpy() for p in net.parameters()]


def by_pipeline(rank: int) -> list[Any]:
    """Give each rank one stage; batches go through in parts. Returns own parameters."""
    import torch
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    net = _net()
    part = net[:2] if rank == 0 else net[2:]
    stage = PipelineStage(part, rank, SIZE, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=torch.nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(part.parameters(), 0.5, momentum=0.9)
    for step in range(STEPS):
        x, y = _data(step)
        optimizer.zero_grad()
        schedule.step(*([x] if rank == 0 else []), **({"target": y} if rank else {}))
        optimizer.step()
    return [p.detach().numpy() for p in part.parameters()]


def train(args: None, ctx: NodeContext) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = ctx.rank
    return {
        "by_pipeline": by_pipeline(rank),
        "alone": _alone(),
        "threads": threads,
    }  # and leave the process group to the node


def test_pipeline_trains_as_one_process_does() -> None:
    lines = Lines()
    with launch(
        train, framework="torch", feeding=Feeding(fed=False), observe=Observe(on_log=lines)
    ) as cluster:
        first, second = cluster.results(_SOON_S)
    assert not [line.text for line in lines.heard if "destroy" in line.text]
    expected = first["alone"]
    cores = len(os.sched_getaffinity(0))
    assert first["threads"] == int(os.environ.get("OMP_NUM_THREADS", max(1, cores // SIZE)))
    found = first["by_pipeline"] + second["by_pipeline"]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)
