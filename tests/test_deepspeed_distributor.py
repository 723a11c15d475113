"""`DeepspeedTorchDistributor`: pyspark's arguments, and ZeRO on processes of CPUs."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import sparkdl
from sparkdl.core.errors import ConfigError, NodeFailedError

if TYPE_CHECKING:
    pass

pytestmark = pytest.mark.torch
needs_deepspeed = pytest.mark.skipif(not find_spec("deepspeed"), reason="no deepspeed")
DEADLINE_S = 280
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.05, "torch_adam": True}},
}


def train(steps: int) -> dict[str, Any]:
    """Train a small network on this rank's rows by the configuration of the command line."""
    import argparse

    import torch

    deepspeed: Any = import_module("deepspeed")
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args, _ = parser.parse_known_args(sys.argv[1:])
    config = json.loads(Path(args.deepspeed_config).read_text())
    deepspeed.init_distributed(dist_backend="gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(16, 4)
    y = x.sum(1, keepdim=True)
    net = torch.nn.Linear(4, 1)
    engine, *_ = deepspeed.initialize(
        model=net, model_parameters=list(net.parameters()), config=config
    )
    losses = []
    for step in range(steps):
        rows = slice((step % 2) * 8 + rank * 8 // size, (step % 2) * 8 + (rank + 1) * 8 // size)
        loss = torch.nn.functional.mse_loss(engine(x[rows]), y[rows])
        engine.backward(loss)
        engine.step()
        torch.distributed.all_reduce(loss)
        losses.append(loss.item() / size)
    return {"losses": losses, "stage": engine.zero_optimization_stage(), "size": size}


@needs_deepspeed
@pytest.mark.deep
@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize("stage", [0, 3])
def test_zero_of_each_stage_trains_on_two_processes_as_on_one(stage: int) -> None:
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    pair = sparkdl.DeepspeedTorchDistributor(2, useGpu=False, deepspeedConfig=config)
    two = pair.run(train, 8)
    assert (two["stage"], two["size"]) == (stage, 2)
    alone = {**CONFIG, "train_micro_batch_size_per_gpu": 8}
    one = sparkdl.DeepspeedTorchDistributor(useGpu=False, deepspeedConfig=alone).run(train, 8)
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert two["losses"][-1] < two["losses"][0]


@needs_deepspeed
@pytest.mark.deep
@pytest.mark.timeout(DEADLINE_S)
def test_program_finds_its_arguments_in_front_of_deepspeeds(tmp_path: Path) -> None:
    program, said = tmp_path / "program.py", tmp_path / "said.json"
    program.write_text(
        "import json, pathlib, sys\n"
        f"pathlib.Path({str(said)!r}).write_text(json.dumps(sys.argv[1:]))\n"
    )
    sparkdl.DeepspeedTorchDistributor(useGpu=False).run(str(program), "--lr=0.1")
    assert json.loads(said.read_text()) == ["--lr=0.1", "--deepspeed"]


@pytest.mark.skipif(bool(find_spec("deepspeed")), reason="DeepSpeed is installed")
def test_missing_deepspeed_says_where_to_install_it() -> None:
    alone = sparkdl.DeepspeedTorchDistributor(useGpu=False, deepspeedConfig={})
    with pytest.raises(NodeFailedError, match=r"DeepSpeed cannot be imported.*pip install deeps"):
        alone.run(train, 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"numGpus": 0}, "numGpus=0: must be at least 1"),
        ({"nnodes": 0}, "nnodes=0: must be at least 1"),
        ({"deepspeedConfig": "/none.json"}, "'/none.json' cannot be used: .*No such file"),
        ({"deepspeedConfig": {"a": {1, 2}}}, "cannot be used: .*not JSON serializable"),
        ({"deepspeedConfig": __file__}, "cannot be used: "),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        sparkdl.DeepspeedTorchDistributor(useGpu=False, **options)
