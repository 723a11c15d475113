"""The variables that torch.distributed reads."""

from __future__ import annotations

import importlib.util

import pytest

from sparkdl.core.errors import FrameworkMissingError
from sparkdl.core.roles import EVALUATOR, WORKER
from sparkdl.core.spec import ClusterSpec, NodeSpec
from sparkdl.core.world import Address, World, build_world
from sparkdl.frameworks.registry import framework_named
from sparkdl.frameworks.torch import Torch


def _world(*hosts: str, evaluator_on: str = "") -> World:
    nodes = {NodeSpec(i, WORKER, i): Address(h, 7000 + i, "") for i, h in enumerate(hosts)}
    if evaluator_on:
        nodes[NodeSpec(len(hosts), EVALUATOR, 0)] = Address(evaluator_on, 7999, "")
    return build_world(0, nodes)


def _environment(world: World, node_id: int) -> dict[str, str]:
    spec = ClusterSpec("c", tuple(member.node for member in world.members))
    return Torch().environment(world, world.member(node_id), spec)


def test_registry_knows_torch() -> None:
    assert isinstance(framework_named("torch"), Torch)
    assert Torch.distributions == ("torch",)


def test_trainers_meet_at_rank_0() -> None:
    world = _world("a", "b", "a", "a")
    assert _environment(world, 2) == {
        "MASTER_ADDR": "a",
        "MASTER_PORT": "7000",
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
    }
    assert _environment(world, 1)["LOCAL_RANK"] == "0"
    assert _environment(world, 1)["LOCAL_WORLD_SIZE"] == "1"


def test_single_node_can_make_a_process_group_as_well() -> None:
    assert _environment(_world("a"), 0)["WORLD_SIZE"] == "1"


def test_nodes_that_do_not_train_are_not_counted() -> None:
    world = _world("a", "a", evaluator_on="a")
    assert _environment(world, 2) == {}
    assert _environment(world, 1)["WORLD_SIZE"] == "2"
    assert _environment(world, 1)["LOCAL_WORLD_SIZE"] == "2"


def test_missing_torch_says_what_to_install() -> None:
    if importlib.util.find_spec("torch"):
        pytest.skip("torch is installed")
    with pytest.raises(FrameworkMissingError, match="pip install torch"):
        Torch().import_modules()


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
