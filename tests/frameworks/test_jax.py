"""What JAX is told, without JAX."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from sparkdl.core.errors import FrameworkMissingError
from sparkdl.core.spec import WORKER, ClusterSpec, NodeSpec
from sparkdl.core.world import Address, build_world
from sparkdl.frameworks.jax import Jax


def test_nodes_of_one_host_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = ("a", "a", "b")
    nodes = {NodeSpec(i, WORKER, i): Address(h, 7000 + i, "") for i, h in enumerate(hosts)}
    world = build_world(0, nodes)
    spec = ClusterSpec("c", tuple(member.node for member in world.members))
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda process: list(range(8)))
    assert Jax().environment(world, world.members[0], spec)["PJRT_NPROC"] == "4"
    assert "PJRT_NPROC" not in Jax().environment(world, world.members[2], spec)
    monkeypatch.setenv("PJRT_NPROC", "6")
    assert "PJRT_NPROC" not in Jax().environment(world, world.members[0], spec)


def test_jax_that_is_too_old_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def initialize(coordinator_address: str, initialization_timeout: int = 300) -> None:
        """As in JAX 0.4."""

    old = SimpleNamespace(__version__="0.4.30", distributed=SimpleNamespace(initialize=initialize))
    monkeypatch.setattr("sparkdl.frameworks.framework.import_module", lambda name: old)
    with pytest.raises(FrameworkMissingError, match=r"JAX 0\.4\.30 on this executor.*0\.8"):
        Jax().import_modules()


def test_coordinator_that_cannot_listen_is_a_lost_port() -> None:
    class JaxRuntimeError(RuntimeError):
        """As in jax.errors, which is not imported here."""

    assert Jax().is_port_lost(JaxRuntimeError("UNKNOWN: Failed to start RPC server"))
    assert not Jax().is_port_lost(JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"))
    assert not Jax().is_port_lost(OSError("Failed to start RPC server"))


def test_process_that_jax_ends_for_another_says_so_in_its_log() -> None:
    said = "F1122 client.h:80] Terminating process because the JAX distributed service detected "
    assert Jax().is_peer_lost_in(f"step 3\n{said}fatal errors. This most likely indicates that …")
    assert not Jax().is_peer_lost_in("F1122 cpu_client.cc:80] Check failed: status.ok()")
