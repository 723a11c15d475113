"""Frameworks on a node with a real GPU: what is fed is computed there, also after a failure.

`pytest -m gpu` runs the tests that need a GPU, here and elsewhere.
"""

from __future__ import annotations

import os
import signal
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.core.options import Feeding
from sparkdl.node.gpus import list_gpus, open_nvml
from tests.doubles.nodes import launch

if TYPE_CHECKING:
    from sparkdl import NodeContext

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

_SOON_S = 200.0
ROWS, BATCH, EPOCHS = 128, 16, 3
UNFED: dict[str, Any] = {"framework": "torch", "feeding": Feeding(fed=False)}
ALONE: dict[str, Any] = {"nodes": 1, "num_gpus": 1}


@pytest.fixture(autouse=True)
def _nodes_see_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


@pytest.fixture
def _has_cuda() -> None:
    if import_module("torch").version.cuda is None:
        pytest.skip("this PyTorch is built without CUDA")


def table() -> pa.Table:
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
    y = x @ np.array([1, -2, 0.5], np.float32)
    return pa.table({"row": np.arange(ROWS), "x": pa.array(list(x)), "y": y})


def line(device: str) -> tuple[Any, Any]:
    import torch

    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1).to(device)
    return net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)


def train(args: dict[str, Any], ctx: NodeContext) -> dict[str, Any]:
    """Train on the feed, and die once at a step."""
    import torch
    from torch.utils.data import DataLoader

    assert not torch.cuda.is_initialized()
    net, optimizer = line("cuda")
    gpus = [os.environ["CUDA_VISIBLE_DEVICES"]]
    seen, step, losses, last = [], 0, [], ctx.last_checkpoint
    if last:
        step = last.step
        saved = torch.load(last.folder / "saved.pt", map_location="cuda")
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        seen, gpus = saved["seen"], [*saved["gpus"], *gpus]
    data = DataLoader(ctx.torch_dataset(BATCH, columns=["row", "x", "y"]), batch_size=None)
    for _ in range(EPOCHS):
        for batch in data:
            x, y = batch["x"].to("cuda"), batch["y"].to("cuda")
            loss = (net(x)[:, 0] - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seen += batch["row"].tolist()
            step += 1
            if step % 4 == 0:
                with ctx.checkpoint(step) as folder:
                    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save({**state, "seen": seen, "gpus": gpus}, folder / "saved.pt")
            if step == args.get("dies_at") and not ctx.restarts:
                os.kill(os.getpid(), signal.SIGKILL)
    return {
        "gpus": gpus,
        "counts": (ctx.num_gpus, torch.cuda.device_count()),
        "devices": {str(p.device) for p in net.parameters()},
        "resumed_at": last and last.step,
        "losses": losses,
        "seen": seen,
    }


@pytest.mark.torch
@pytest.mark.usefixtures("_has_cuda")
def test_killed_child_goes_on_on_the_same_gpu_with_the_rows_that_it_lacks(tmp_path: Path) -> None:
    with open_nvml() as nvml:
        there = {gpu.uuid for gpu in list_gpus(nvml)}
    options = {"checkpoint_dir": str(tmp_path), "max_restarts": 1, **ALONE}
    args = {"dies_at": 10}
    with launch(train, args, framework="torch", **options) as cluster:
        report = cluster.feed(table(), epochs=EPOCHS, timeout_s=_SOON_S)
        (found,) = cluster.results(_SOON_S)
        assert cluster.world.generation == 1
    assert report.rows_unused == 0
    before, after = found["gpus"]
    assert before == after in there
    assert (found["counts"], found["devices"]) == ((1, 1), {"cuda:0"})
    assert found["resumed_at"] == 8
    assert sorted(found["seen"]) == sorted(EPOCHS * list(range(ROWS)))
    assert found["losses"][-1] < 0.5 * found["losses"][0]


def by_nccl(args: None, ctx: NodeContext) -> dict[str, Any]:
    """Train by DDP in the process group that PyTorch chooses, on a mesh, and as one process."""
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = ctx.mesh(data=-1)
    found: dict[str, Any] = {"mesh": mesh.device_type, "weights": []}
    found["backend"] = distributed.get_backend_config()
    total = torch.ones(3, device="cuda")
    distributed.all_reduce(total)
    found["total"] = total.tolist()
    for device in ("cuda", "cpu"):
        net, optimizer = line(device)
        model = DistributedDataParallel(net, device_ids=[0]) if device == "cuda" else net
        for step in range(4):
            x = torch.randn(BATCH, 3, generator=torch.Generator().manual_seed(step)).to(device)
            optimizer.zero_grad()
            (model(x)[:, 0] - x.sum(1)).square().mean().backward()
            optimizer.step()
        found["weights"].append([p.detach().cpu().numpy() for p in net.parameters()])
    return found


@pytest.mark.torch
@pytest.mark.usefixtures("_has_cuda")
def test_default_process_group_of_a_node_with_a_gpu_is_nccls_and_ddp_trains_in_it() -> None:
    with launch(by_nccl, **ALONE, **UNFED) as cluster:
        (found,) = cluster.results(_SOON_S)
    assert (found["mesh"], found["total"]) == ("cuda", [1.0] * 3)
    assert "cuda:nccl" in found["backend"]
    for one, other in zip(*found["weights"], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def by_horovod(gpu: str, ctx: NodeContext) -> dict[str, Any]:
    """Exchange tensors of the GPU that both nodes share, and train; then the same on CPUs."""
    # NCCL refuses two ranks on one GPU of a host, so each takes itself for another host.
    os.environ |= {"CUDA_VISIBLE_DEVICES": gpu, "NCCL_HOSTID": f"host-{ctx.rank}"}
    import torch

    import sparkdl.horovod.torch as hvd

    hvd.init()
    found: dict[str, Any] = {}
    for device in ("cuda", "cpu"):
        mine = torch.arange(4.0, device=device) + hvd.rank()
        results = [
            hvd.allreduce(mine),
            hvd.allreduce(mine, op=hvd.Max),
            hvd.allreduce(mine.long(), op=hvd.Sum),
            hvd.allgather(mine[: hvd.rank() + 1]),
            hvd.broadcast(mine, 1),
            hvd.alltoall(mine),
            hvd.reducescatter(mine, op=hvd.Sum),
            hvd.synchronize(hvd.allreduce_async(mine, op=hvd.Sum)),
            *hvd.grouped_allreduce([mine, mine[:1]], op=hvd.Sum),
        ]
        torch.manual_seed(hvd.rank())
        layers = torch.nn.Linear(3, 5), hvd.SyncBatchNorm(5), torch.nn.Linear(5, 1)
        net = torch.nn.Sequential(*layers).to(device)
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
        for step in range(4):
            random = torch.Generator().manual_seed(10 * step + hvd.rank())
            x = torch.randn(BATCH, 3, generator=random).to(device)
            optimizer.zero_grad()
            (net(x)[:, 0] - x.sum(1)).square().mean().backward()
            optimizer.step()
        tensors = [*results, *net.state_dict().values()]
        assert {tensor.device.type for tensor in tensors} == {device}
        found[device] = [tensor.detach().cpu().numpy() for tensor in tensors]
    hvd.shutdown()
    return found


@pytest.mark.torch
@pytest.mark.usefixtures("_has_cuda")
def test_horovods_operations_on_tensors_of_a_gpu_give_what_those_on_cpus_do() -> None:
    with open_nvml() as nvml:
        gpu = list_gpus(nvml)[0].uuid
    # PyTorch is imported by the nodes' function, after it has chosen the GPU.
    options = {**UNFED, "framework": "plain", "num_gpus": 0}
    with launch(by_horovod, gpu, nodes=2, **options) as cluster:
        results = cluster.results(_SOON_S)
    for found in results:
        for one, other in zip(found["cuda"], found["cpu"], strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


def by_jax(args: None, ctx: NodeContext) -> dict[str, Any]:
    """Train on the feed, its rows split over a mesh of this node's devices."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax
    from jax import numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = ctx.mesh(data=-1)
    weights = jax.device_put(jnp.zeros(3), NamedSharding(mesh, PartitionSpec()))
    rows = NamedSharding(mesh, PartitionSpec("data"))

    def loss_of(weights: Any, x: Any, y: Any) -> Any:
        return jnp.square(x @ weights - y).mean()

    slope = jax.jit(jax.value_and_grad(loss_of))
    losses, devices = [], set()
    for _ in range(EPOCHS):
        for x, y, _weight in ctx.jax_batches(BATCH, x="x", y="y", sharding=rows):
            loss, by = slope(weights, x, y)
            weights -= 0.1 * by
            losses.append(float(loss))
            devices |= {device.platform for device in (*x.devices(), *weights.devices())}
    names = [device.platform for device in jax.devices()]
    return {"names": names, "devices": devices, "losses": losses, "gpus": ctx.num_gpus}


@pytest.mark.jax
def test_jax_trains_on_the_gpu_with_rows_of_the_feed() -> None:
    with launch(by_jax, framework="jax", **ALONE) as cluster:
        cluster.feed(table(), epochs=EPOCHS, timeout_s=_SOON_S)
        (found,) = cluster.results(_SOON_S)
    if found["names"] == ["cpu"]:
        pytest.skip("this JAX is built without CUDA")
    assert (found["names"], found["devices"], found["gpus"]) == (["gpu"], {"gpu"}, 1)
    assert len(found["losses"]) == EPOCHS * ROWS // BATCH
    assert found["losses"][-1] < 0.5 * found["losses"][0]
