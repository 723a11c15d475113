"""The variables that torch.distributed reads."""

from __future__ import annotations

import atexit

import psutil
import pytest

from sparkdl.core.spec import EVALUATOR, WORKER, ClusterSpec, NodeSpec
from sparkdl.core.world import Address, World, build_world
from sparkdl.frameworks.torch import Torch


def _world(*hosts: str, evaluator_on: str = "") -> World:
    nodes = {NodeSpec(i, WORKER, i): Address(h, 7000 + i, "") for i, h in enumerate(hosts)}
    if evaluator_on:
        nodes[NodeSpec(len(hosts), EVALUATOR, 0)] = Address(evaluator_on, 7999, "")
    return build_world(0, nodes)


def _environment(world: World, node_id: int) -> dict[str, str]:
    spec = ClusterSpec("c", tuple(member.node for member in world.members))
    return Torch().environment(world, world.member(node_id), spec)


def test_trainers_meet_at_rank_0() -> None:
    world = _world("a", "b", "a", "a")
    assert _environment(world, 2) == {
        "MASTER_ADDR": "a", "MASTER_PORT": "7000", "RANK": "2", "WORLD_SIZE": "4",
        "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default", "ROLE_RANK": "2", "ROLE_WORLD_SIZE": "4",
        "TORCHELASTIC_RUN_ID": "c", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }  # fmt: skip
    assert _environment(world, 1)["LOCAL_RANK"] == "0"
    assert _environment(world, 1)["LOCAL_WORLD_SIZE"] == "1"
    assert _environment(world, 1)["GROUP_RANK"] == "1"


def test_local_rank_is_the_number_of_a_gpu_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _world("a", "a", "b")
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    for gpus, expected in (
        ("GPU-1", ["0", "1", "1", "3"]),  # its own
        ("0,1", ["1", "2", "0", "2"]),  # those of its host
        ("", ["1", "2", "0", "2"]),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        found = _environment(world, 1)
        assert [found[name] for name in names] == expected
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-2")
    assert _environment(world, 2)["LOCAL_RANK"] == "0"


def test_gloo_and_rpc_use_the_network_that_the_nodes_use(monkeypatch: pytest.MonkeyPatch) -> None:
    (loopback,) = {
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(address.address == "127.0.0.1" for address in addresses)
    }
    monkeypatch.setenv("TP_SOCKET_IFNAME", "chosen")
    found = _environment(_world("127.0.0.1"), 0)
    assert found["GLOO_SOCKET_IFNAME"] == loopback
    assert found["TP_SOCKET_IFNAME"] == "chosen"


def test_nodes_that_do_not_train_are_not_counted() -> None:
    world = _world("a", "a", evaluator_on="a")
    assert _environment(world, 2) == {}
    assert _environment(world, 1)["WORLD_SIZE"] == "2"
    assert _environment(world, 1)["LOCAL_WORLD_SIZE"] == "2"


@pytest.mark.torch
def test_nodes_of_one_host_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    counts: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setattr(atexit, "register", print)
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda process: list(range(8)))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    world = _world("a", "a", "b")
    Torch().before_map_fun(world, world.members[0])
    Torch().before_map_fun(world, world.members[2])  # which has its host to itself
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    Torch().before_map_fun(world, world.members[0])
    assert counts == [4], "the user's own number is left alone"


def test_store_that_cannot_listen_is_a_lost_port() -> None:
    class DistNetworkError(RuntimeError):
        """As in torch.distributed, which is not imported here."""

    lost = DistNetworkError(
        "The server socket has failed to listen on any local network address. port: 29500, "
        "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
    )
    assert Torch().is_port_lost(lost)
    assert not Torch().is_port_lost(RuntimeError("CUDA error: out of memory"))
    assert not Torch().is_port_lost(OSError("[Errno 98] Address already in use"))
