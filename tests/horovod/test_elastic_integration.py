"""Trainings by `run_elastic` that lose a process, and go on at the last commit that was written."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from sparkdl.core.errors import ConfigError
from sparkdl.horovod.spark import run, run_elastic
from tests.doubles.map_funs import hold_checkpoint

pytestmark = pytest.mark.torch

ROWS, BATCH, EPOCHS = 22, 3, 2
LOCAL: dict[str, Any] = {"executor": "local", "framework": "torch"}


def train() -> list[dict[str, Any]]:
    """Train twice: rank 1 kills itself in the first training, and nothing disturbs the second."""
    import torch

    import sparkdl.horovod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    return [fit(hvd, is_elastic) for is_elastic in (True, False)]


def fit(hvd: Any, is_elastic: bool) -> dict[str, Any]:
    """Train on rows of a sampler, committing every other batch.

    Args:
        is_elastic: whether rank 1 kills itself once, a batch after a commit that is held up.
    """
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from sparkdl.node.context import current

    x = torch.arange(float(ROWS)).view(ROWS, 1) / ROWS
    data = TensorDataset(x, 3 * x + 1, torch.arange(ROWS))
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    sampler = hvd.elastic.ElasticSampler(data, seed=5)
    resets: list[int] = []
    state = hvd.elastic.TorchState(
        model, optimizer, sampler=sampler, schedule=schedule, epoch=0, batch=0, seen=[]
    )
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    def loop(state: Any) -> dict[str, Any]:
        begun = (state.epoch, state.batch)
        while state.epoch < EPOCHS:
            sampled = DataLoader(data, batch_size=BATCH, sampler=state.sampler)
            for xs, ys, numbers in sampled:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(xs), ys).backward()
                optimizer.step()
                schedule.step()
                state.seen = state.seen + [n for r in hvd.allgather(numbers) for n in [int(r)]]
                state.sampler.record_batch(state.batch, len(numbers))
                state.batch += 1
                dies = is_elastic and (state.epoch, state.batch, hvd.rank()) == (1, 3, 1)
                if dies and not current().restarts:  # type: ignore[union-attr]
                    os.kill(os.getpid(), signal.SIGKILL)
                if is_elastic and state.batch % 2 == 0:
                    state.commit()
            state.epoch, state.batch = state.epoch + 1, 0
            state.sampler.set_epoch(state.epoch)
        return {"begun": begun}

    if is_elastic:
        ctx = current()
        assert ctx is not None
        hold_checkpoint(ctx, 3)
        found: dict[str, Any] = hvd.elastic.run(loop)(state)
        assert ctx._checkpoints._in_flight is None, "the end waits for the last commit"
    else:
        state.sync()
        found = loop(state)
    found |= {"seen": state.seen, "resets": resets, "rate": schedule.get_last_lr()}
    return found | {
        "weights": [p.detach().numpy() for p in model.parameters()],
        "type": type(state),
    }


@pytest.mark.smoke
def test_killed_process_costs_what_came_after_the_last_commit_written(tmp_path: Path) -> None:
    options = {**LOCAL, "checkpoint_dir": str(tmp_path)}
    results = run_elastic(train, num_proc=2, verbose=0, **options)
    for mine, other in results:
        assert mine["begun"] == (0, 4), "not (1, 2), whose write was held up during the third batch"
        assert other["begun"] == (0, 0)
        assert (mine["resets"], other["resets"]) == ([2], [])
        assert mine["seen"] == other["seen"], "the same rows, in the same order"
        assert sorted(mine["seen"]) == sorted([*range(ROWS)] * EPOCHS)
        assert mine["rate"] == other["rate"]
        for one, two in zip(mine["weights"], other["weights"], strict=True):
            assert one == pytest.approx(two, abs=1e-6)
        assert mine["type"].__name__ == "TorchState", "results may be anything"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"use_mpi": True}, "leave it out"),
        ({"nics": ["eth0"]}, "leave it out"),
        ({"executable": "python"}, "PYSPARK_PYTHON"),
        ({"env": {"A": 1}}, "must be strings"),
        ({}, "HOROVOD_SPARK_START_TIMEOUT='soon'"),
        ({"num_proc": None}, "needs num_proc"),
    ],
)
def test_what_cannot_run_is_refused(
    wrong: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_SPARK_START_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match=why):
        run(print, **{"num_proc": 2, **LOCAL, **wrong})
