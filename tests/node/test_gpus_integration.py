"""Real nodes on a host with made-up GPUs, then with a real one: who gets which, and who none.

`pytest -m gpu` runs the tests that need a GPU, here and elsewhere.
"""

from __future__ import annotations

import ctypes
import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkdl.core.errors import SparkConfigError
from sparkdl.core.options import Feeding, Roles
from sparkdl.node.context import NodeContext
from sparkdl.node.gpus import is_claimed, list_gpus, open_nvml
from tests.doubles.nodes import SOON_S, launch
from tests.doubles.nvml import new_uuid, write_pynvml
from tests.doubles.until import until

H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[str]]:
    """A function that gives the nodes' host so many GPUs, and returns their UUIDs."""

    def make(count: int) -> list[str]:
        uuids = [new_uuid() for _ in range(count)]
        write_pynvml(tmp_path, [(one, H100, ()) for one in uuids])
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return uuids

    return make


def tell(folder: Path, ctx: NodeContext, told: Any) -> None:
    """Write a node's words into `folder`; a trainer waits for all, for the others end with it."""
    part = folder / f"{ctx.rank}.part"
    part.write_text(json.dumps(told))
    part.rename(folder / f"{ctx.job_name}-{ctx.task_index}")
    if ctx.member.role.is_trainer:
        until(lambda: len(list(folder.glob("*-*"))) == ctx.world.size)


def see(folder: Path, ctx: NodeContext) -> None:
    tell(folder, ctx, [ctx.num_gpus, os.environ["CUDA_VISIBLE_DEVICES"].split(",")])


def see_and_stay(folder: Path, ctx: NodeContext) -> None:
    """As `see`; a node that trains returns, and frees its GPUs, when a file says so."""
    see(folder, ctx)
    if ctx.member.role.is_trainer:
        until(folder.with_suffix(".over").exists)


def told(folder: Path) -> dict[str, tuple[int, list[Any]]]:
    return {path.name: tuple(json.loads(path.read_text())) for path in folder.iterdir()}


def folder_in(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    return folder


@pytest.mark.smoke
def test_clusters_at_once_share_a_hosts_gpus_but_no_gpu(host: Any, tmp_path: Path) -> None:
    uuids = host(4)
    one, two = folder_in(tmp_path, "one"), folder_in(tmp_path, "two")
    roles: dict[str, Any] = {"roles": Roles(ps=1, chief="chief", evaluator=True)}
    with (
        launch(
            see_and_stay, one, nodes=4, num_gpus=1, feeding=Feeding(fed=False), **roles
        ) as first,
        launch(
            see_and_stay, two, nodes=1, num_gpus={"worker": 2}, feeding=Feeding(fed=False)
        ) as second,
    ):
        assert until(lambda: len([*one.glob("*-*"), *two.glob("*-*")]) == 5)
        given = told(one) | {f"other {name}": words for name, words in told(two).items()}
        assert {name: count for name, (count, _seen) in given.items()} == {
            "chief-0": 1, "worker-0": 1, "ps-0": 0, "evaluator-0": 0, "other worker-0": 2,
        }  # fmt: skip
        assert given["ps-0"][1] == given["evaluator-0"][1] == [""]
        taken = [gpu for count, seen in given.values() for gpu in seen if count]
        assert sorted(taken) == sorted(uuids)
        with pytest.raises(SparkConfigError) as refused:
            launch(see, two, nodes=1, num_gpus=5, feeding=Feeding(fed=False))
        assert "worker:0 on host" in str(refused.value)
        assert "4 found, 0 free" in str(refused.value)
        for cluster, folder in ((first, one), (second, two)):
            folder.with_suffix(".over").touch()
            cluster.results(SOON_S)
    assert not any(map(is_claimed, uuids))


def find(folder: Path, ctx: NodeContext) -> None:
    """Tell how many GPUs this node was given, and which CUDA finds, asked of the driver itself.

    A node that trains returns, and frees its GPUs, when a file says so.
    """
    cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    status = cuda.cuInit(0)
    if status == 100:  # CUDA_ERROR_NO_DEVICE
        tell(folder, ctx, [ctx.num_gpus, []])
        return
    assert status == 0
    assert cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
    found = []
    for index in range(count.value):
        raw = ctypes.create_string_buffer(16)
        assert cuda.cuDeviceGetUuid_v2(raw, index) == 0
        found.append(str(uuid.UUID(bytes=raw.raw)))
    tell(folder, ctx, [ctx.num_gpus, found])
    if ctx.member.role.is_trainer:
        until(folder.with_suffix(".over").exists)


@pytest.mark.gpu
@pytest.mark.parametrize("is_asked_for", [True, False])
def test_cuda_finds_the_gpu_that_a_node_was_given_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_asked_for: bool
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with open_nvml() as nvml:
        there = list_gpus(nvml)
    assert there, "nvidia-smi is here, and NVML lists no GPU"
    wanted = len(there) if is_asked_for else 1
    options: dict[str, Any] = {"num_gpus": wanted if is_asked_for else None, "roles": Roles(ps=1)}
    folder = folder_in(tmp_path, "told")
    with launch(find, folder, nodes=2, feeding=Feeding(fed=False), **options) as cluster:
        assert until(lambda: len(list(folder.glob("*-*"))) == 2, 6 * SOON_S)
        given = told(folder)
        assert given["ps-0"] == (0, [])
        count, found = given["worker-0"]
        assert (count, len(set(found))) == (wanted, wanted)
        claimed = [gpu for gpu in there if is_claimed(gpu.uuid)]
        assert sorted(gpu.uuid.partition("-")[2] for gpu in claimed) == sorted(found)
        with pytest.raises(SparkConfigError, match="0 free"):
            launch(find, folder, nodes=1, num_gpus=len(there))
        folder.with_suffix(".over").touch()
        cluster.results(6 * SOON_S)
