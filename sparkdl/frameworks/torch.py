"""What PyTorch needs to find its cluster: the variables of torchrun.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

from sparkdl.core.errors import FrameworkMissingError
from sparkdl.core.settings import visible_gpus
from sparkdl.core.spec import ClusterSpec
from sparkdl.core.world import Member, World
from sparkdl.frameworks.framework import Framework
from sparkdl.frameworks.mesh import axis_sizes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Torch(Framework):
    """PyTorch, for `torch.distributed.init_process_group()` without arguments."""

    name: ClassVar[str] = "torch"
    distributions: ClassVar[tuple[str, ...]] = ("torch",)
    shares_port: ClassVar[bool] = True

    def import_modules(self) -> None:
        """Import torch.

        Raises:
            FrameworkMissingError: if it cannot be imported.
        """
        try:
            import_module("torch")
        except ImportError as error:
            raise FrameworkMissingError(
                f"PyTorch cannot be imported on this executor: {error}. Install it in the Python "
                "environment of the executors: pip install torch"
            ) from error

    def environment(self, world: World, member: Member, spec: ClusterSpec) -> dict[str, str]:
        """Return torchrun's variables; nothing for a node that does not train.

        Ranks count trainers only: they come first in a world, and first on each host.
        """
        if not member.role.is_trainer:
            return {}
        leader = world.trainers[0]
        on_host = sum(trainer.host == member.host for trainer in world.trainers)
        return {
            "MASTER_ADDR": leader.host,
            "MASTER_PORT": str(leader.port),
            "RANK": str(member.rank),
            "WORLD_SIZE": str(len(world.trainers)),
            "LOCAL_RANK": str(member.local_rank),
            "LOCAL_WORLD_SIZE": str(on_host),
        }

    def mesh(self, axes: Mapping[str, int], world: World, member: Member) -> DeviceMesh:
        """Return a mesh of all nodes that train; make the default process group if there is none.

        It is of GPUs where this node has one, unless the process group that is there is gloo's.
        """
        import torch
        from torch import distributed
        from torch.distributed.device_mesh import init_device_mesh

        sizes = axis_sizes(axes, len(world.trainers), "nodes that train")
        is_gloo = distributed.is_initialized() and distributed.get_backend() == "gloo"
        device = "cuda" if torch.cuda.is_available() and not is_gloo else "cpu"
        if device == "cuda" and visible_gpus():
            torch.cuda.set_device(0)  # of those that are this node's alone
        return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def is_port_lost(self, error: BaseException) -> bool:
        """Whether the store of rank 0 could not listen (`DistNetworkError`, a RuntimeError)."""
        return isinstance(error, RuntimeError) and "address already in use" in str(error).lower()
