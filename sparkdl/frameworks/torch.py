"""Connect PyTorch with its cluster: the variables of torchrun."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

import psutil

from sparkdl.core.settings import visible_gpus
from sparkdl.core.spec import ClusterSpec
from sparkdl.core.world import Member, World
from sparkdl.datasets.mesh import axis_sizes
from sparkdl.frameworks.framework import Framework, imported, shared_cores

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh


class Torch(Framework):
    """PyTorch, for `torch.distributed.init_process_group()` without arguments."""

    name: ClassVar[str] = "torch"
    distributions: ClassVar[tuple[str, ...]] = ("torch",)
    shares_port: ClassVar[bool] = True

    def import_modules(self) -> None:
        imported("torch", "PyTorch", "torch")

    def import_more(self) -> None:
        """Import what optimizers import at their first step, which takes as long as torch itself.

        https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_compile.py
        """
        with suppress(Exception):  # whatever it is, the optimizer will say so
            import_module("torch._dynamo")

    def gpus(self) -> list[str]:
        import torch

        return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]

    def environment(self, world: World, member: Member, spec: ClusterSpec) -> dict[str, str]:
        """Return torchrun's variables; nothing for a node that does not train.

        Ranks count trainers only: they come first in a world, and first on each host.
        `LOCAL_RANK` is always the number of a GPU that this process sees, if it sees any. If each
        node of a host has GPUs of its own, it is 0, as with `torchrun --virtual-local-rank`: the
        node is a group of one process. Gloo and RPC use the network in which the others reach this
        node, unless the user has chosen one.
        https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
        """
        if not member.role.is_trainer:
            return {}
        leader, size = world.trainers[0], len(world.trainers)
        found = {
            "MASTER_ADDR": leader.host,
            "MASTER_PORT": leader.port,
            "RANK": member.rank,
            "WORLD_SIZE": size,
            **_group(world, member),
            "ROLE_NAME": "default",
            "ROLE_RANK": member.rank,
            "ROLE_WORLD_SIZE": size,
            "TORCHELASTIC_RUN_ID": spec.cluster_id,
            "TORCHELASTIC_RESTART_COUNT": world.generation,
            "TORCHELASTIC_MAX_RESTARTS": spec.settings.max_restarts,
            "TORCHELASTIC_USE_AGENT_STORE": False,  # rank 0 listens at MASTER_PORT itself
        }
        # As torchrun sets it: an error of NCCL ends the process, which would wait for ever.
        chosen = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
        if interface := interface_of(member.host):
            chosen |= {"GLOO_SOCKET_IFNAME": interface, "TP_SOCKET_IFNAME": interface}
        chosen = {name: os.environ.get(name, value) for name, value in chosen.items()}
        return {name: str(value) for name, value in (found | chosen).items()}

    def before_map_fun(self, world: World, member: Member) -> None:
        """Share the host's cores with the other nodes on it; have process groups destroyed.

        Hugging Face's Accelerate takes a process without a GPU for the only one, unless a variable
        says that the training is one of CPUs: each node would train a separate model.

        A number of threads that the environment sets (OMP_NUM_THREADS) is left alone: Spark sets
        `spark.task.cpus`. A process group is destroyed at this process's end if it is there still.
        """
        torch = import_module("torch")
        cores = shared_cores(world, member)
        if cores and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(cores)
        if len(world.trainers) > 1 and not torch.cuda.is_available():
            os.environ.setdefault("ACCELERATE_USE_CPU", "true")
        atexit.register(_destroy_process_group)

    def generator(self, seed: Sequence[int]) -> torch.Generator:
        import torch

        # Mixed, because seeds of few bits make PyTorch's first numbers alike.
        return torch.Generator().manual_seed(int(super().generator(seed).integers(1 << 62)))

    def mesh(self, axes: Mapping[str, int], world: World, member: Member) -> DeviceMesh:
        """Return a mesh of all nodes that train; make the default process group if there is none.

        The mesh is of GPUs if this node has one (the GPU of `LOCAL_RANK`, unless the user has set a
        device), but of CPUs if an existing process group is gloo's.
        """
        import torch
        from torch import distributed
        from torch.distributed.device_mesh import init_device_mesh

        sizes = axis_sizes(axes, len(world.trainers), "nodes that train")
        is_gloo = distributed.is_initialized() and distributed.get_backend() == "gloo"
        device = "cuda" if torch.cuda.is_available() and not is_gloo else "cpu"
        return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def is_port_lost(self, error: BaseException) -> bool:
        """Whether the store of rank 0 could not listen (`DistNetworkError`, a RuntimeError)."""
        return isinstance(error, RuntimeError) and "address already in use" in str(error).lower()


def _group(world: World, member: Member) -> dict[str, int]:
    """Return the place in what torchrun calls a node: processes that share a host's devices."""
    on_host = sum(trainer.host == member.host for trainer in world.trainers)
    gpus = visible_gpus()
    # Each node sees only some of the host's GPUs, so its place on the host would be no index.
    if gpus and len(gpus) < on_host:
        place = (0, 1, member.rank, len(world.trainers))
    else:
        hosts = list(dict.fromkeys(trainer.host for trainer in world.trainers))
        place = (member.local_rank, on_host, hosts.index(member.host), len(hosts))
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    return dict(zip(names, place, strict=True))


def interface_of(host: str) -> str | None:
    """Return the name of the network interface that has the address `host`, if one has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return str(name)
    return None


def _destroy_process_group() -> None:
    distributed = import_module("torch.distributed")
    if distributed.is_available() and distributed.is_initialized():
        with suppress(Exception):  # a group whose other members are gone
            distributed.destroy_process_group()
