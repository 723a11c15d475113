"""Connect JAX with its cluster: `jax.distributed` over all nodes that train.

JAX has a coordinator in rank 0's process. When that process dies, JAX aborts all others and logs it
there. Their failures rank behind rank 0's, which may be reported later. The loss of any other node
is noticed in time by sparkdl alone: JAX would notice it by missed heartbeats, much later.
"""

from __future__ import annotations

import atexit
import ctypes
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from inspect import signature
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from sparkdl.core.errors import FrameworkMissingError
from sparkdl.core.spec import ClusterSpec
from sparkdl.core.world import Member, World
from sparkdl.datasets.mesh import axis_sizes
from sparkdl.frameworks.framework import Framework, imported, shared_cores

if TYPE_CHECKING:
    import jax

_INIT_TIMEOUT_S = 300
_HEARTBEAT_TIMEOUT_S = 600
"""Much longer than sparkdl's own leases: these end a node within about a minute after a cut."""
_SHUTDOWN_TIMEOUT_S = 24 * 3600
"""Nodes wait here for the slowest one's `map_fun`; one that failed ends the wait."""

_ENDED_BY_JAX = "JAX distributed service detected fatal errors"

_OPTIONS = {
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": ("jax_cpu_collectives_implementation", "gloo"),
    # JAX takes SIGTERM for the notice of a preemption and goes on: a node would end by SIGKILL.
    "JAX_ENABLE_PREEMPTION_SERVICE": ("jax_enable_preemption_service", False),
}


class Jax(Framework):
    """JAX, with one process a node; Keras 3 with the backend jax."""

    name: ClassVar[str] = "jax"
    distributions: ClassVar[tuple[str, ...]] = ("jax",)
    shares_port: ClassVar[bool] = True
    import_environment: ClassVar[Mapping[str, str]] = MappingProxyType({"KERAS_BACKEND": "jax"})

    def import_modules(self) -> None:
        jax = imported("jax", "JAX", "jax (or 'jax[cuda13]')")
        # JAX's default would end a node for which sparkdl still waits.
        if "heartbeat_timeout_seconds" not in signature(jax.distributed.initialize).parameters:
            raise FrameworkMissingError(
                f"JAX {jax.__version__} on this executor has no setting for how long to wait for a "
                "node: install 0.8 or newer"
            )

    def gpus(self) -> list[str]:
        """Return the GPUs' names. JAX reserves their memory then, unless configured not to."""
        import jax

        return [gpu.device_kind for gpu in jax.local_devices() if gpu.platform == "gpu"]

    def environment(self, world: World, member: Member, spec: ClusterSpec) -> dict[str, str]:
        """Return this node's share of the host's cores, unless the user has set it.

        XLA takes `PJRT_NPROC` for the number of cores.
        """
        cores = shared_cores(world, member)
        return {"PJRT_NPROC": str(cores)} if cores and "PJRT_NPROC" not in os.environ else {}

    def before_map_fun(self, world: World, member: Member) -> None:
        """Connect the nodes that train, so that `jax.devices()` are those of all of them.

        A node alone needs nothing. Source:
        https://docs.jax.dev/en/latest/_autosummary/jax.distributed.initialize.html
        """
        if not member.role.is_trainer or len(world.trainers) == 1:
            return
        import jax

        # JAX has read its variables at the import, so the options are set directly.
        for variable, (option, value) in _OPTIONS.items():
            if variable not in os.environ:
                jax.config.update(option, value)
        leader = world.trainers[0]
        jax.distributed.initialize(
            coordinator_address=leader.address,
            num_processes=len(world.trainers),
            process_id=member.rank,
            # All is said here: JAX would look for a cluster of Slurm, MPI or others on its own.
            cluster_detection_method="deactivate",
            coordinator_bind_address=leader.address,
            initialization_timeout=_INIT_TIMEOUT_S,
            heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT_S,
            shutdown_timeout_seconds=_SHUTDOWN_TIMEOUT_S,
        )

    def after_map_fun(self, has_failed: bool) -> None:
        """Disconnect: all nodes together, or, if this one has failed, without the others."""
        import jax

        if not jax.distributed.is_initialized():
            return
        if has_failed:
            _leave_without_goodbye()
        else:
            jax.distributed.shutdown()

    def generator(self, seed: Sequence[int]) -> jax.Array:
        import jax

        return jax.random.key(int(super().generator(seed).integers(1 << 31)))

    def mesh(self, axes: Mapping[str, int], world: World, member: Member) -> jax.sharding.Mesh:
        """Return a mesh of all nodes' devices, those of one node beside each other."""
        import jax
        import numpy as np

        # `jax.devices()` need not be in this order, and a node's devices must be neighbours.
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        nodes = len(world.trainers)
        what = f"devices ({nodes} nodes that train, {len(jax.local_devices())} devices each)"
        sizes = axis_sizes(axes, len(devices), what)
        grid = np.array(devices).reshape(tuple(sizes.values()))
        return jax.sharding.Mesh(grid, tuple(sizes))

    def is_port_lost(self, error: BaseException) -> bool:
        """Whether JAX's coordinator could not listen on rank 0's port (a `JaxRuntimeError`)."""
        return isinstance(error, RuntimeError) and "Failed to start RPC server" in str(error)

    def is_peer_lost_in(self, log: str) -> bool:
        """Whether JAX has ended this process because another node, or the way to it, has gone."""
        return _ENDED_BY_JAX in log


def _leave_without_goodbye() -> None:
    """Make this process end at once: the others would wait for it, and it for them.

    JAX says goodbye at the exit, and when its objects are deleted.
    """
    atexit.unregister(import_module("jax._src.api").clean_up)
    state = import_module("jax._src.distributed").global_state
    for held in (state.client, state.service):
        # References that are never given back: the destructors would wait for the other nodes.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
