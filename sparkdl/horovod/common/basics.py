"""`hvd.init`, `hvd.rank`, and what else Horovod answers of the world.

https://github.com/horovod/horovod/blob/v0.28.1/horovod/common/basics.py
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

from sparkdl.collectives.transport import Op
from sparkdl.core.errors import ConfigError, RemovedError
from sparkdl.horovod.common.process_sets import (
    HorovodInternalError,
    ProcessSet,
    add_process_set,
    connect_processes,
    global_process_set,
    horovod_state,
    is_initialized,
    remove_process_set,
    shutdown,
)

__all__ = [  # what each face has, whatever its framework
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
]

Average = Op.AVERAGE
Sum = Op.SUM
Min = Op.MIN
Max = Op.MAX
Product = Op.PRODUCT
Adasum = "Adasum"
"""Refused where it is given: the learning rate is not adapted to the gradients' angles."""


def init(
    comm: Any = None, process_sets: Sequence[ProcessSet] | Literal["dynamic"] | None = None
) -> None:
    """Find the other processes, and connect with them. All call it; a second call does nothing.

    Inside a node of sparkdl these are the nodes that train; elsewhere the process is alone.

    Args:
        comm: ranks of all processes, or nothing. Without MPI there is no communicator.
        process_sets: to make at once; `"dynamic"` is accepted, since sets can always be added.

    Raises:
        ConfigError: for a communicator, a part of the ranks, or a process set given twice; on a
            node that does not train.
        CollectiveError: if the processes do not reach each other.
        FrameworkMissingError: if some of several processes have no PyTorch, which connects them.
    """
    if is_initialized():
        return
    here = connect_processes()
    try:
        is_all = isinstance(comm, (list, tuple)) and sorted(comm) == [*range(here.size)]
        if comm and not is_all:
            raise ConfigError(
                f"hvd.init(comm={comm!r}): sparkdl uses no MPI. Leave comm out; for a part of the "
                "processes use process_sets"
            )
        for process_set in () if process_sets == "dynamic" else process_sets or ():
            add_process_set(process_set)
    # So that a further `init` does not take the world for complete.
    except ConfigError:
        shutdown()
        raise


def rank() -> int:
    """Return the order of this process among all, from 0."""
    return horovod_state().rank


def size() -> int:
    """Return how many processes there are."""
    return horovod_state().size


def local_rank() -> int:
    """Return the order of this process among those on its host, from 0."""
    return horovod_state().placement.local_rank


def local_size() -> int:
    """Return how many processes there are on this one's host."""
    return len(horovod_state().placement.on_host)


def cross_rank() -> int:
    """Return the order of this process among those with its local rank on all hosts."""
    placement = horovod_state().placement
    return placement.across.index(placement.rank)


def cross_size() -> int:
    """Return how many hosts have a process with this one's local rank."""
    return len(horovod_state().placement.across)


def is_homogeneous() -> bool:
    """Whether each host has the same number of processes."""
    hosts = horovod_state().placement.hosts
    return len({hosts.count(host) for host in hosts}) == 1


def op_of(op: Any = None, average: bool | None = None) -> Op:
    """Return the operation that a call of Horovod's asks for.

    Args:
        op: one of the names above; `Average` by default.
        average: Horovod's older way of saying `Average` or `Sum`.

    Raises:
        ConfigError: if both are given, or for something else.
        RemovedError: for `Adasum`.
    """
    if op is not None and average is not None:
        raise ConfigError(f"average={average} and op cannot both be given: leave out average")
    if op is None:
        return Op.SUM if average is False else Op.AVERAGE
    if op == Adasum:
        raise RemovedError(
            "op=hvd.Adasum: sparkdl does not adapt gradients by their angles. Use hvd.Average, "
            "with a learning rate that warms up"
        )
    if not isinstance(op, Op):
        raise ConfigError(f"op={op!r}: choose hvd.Average, Sum, Min, Max or Product")
    return op


def gloo_built(verbose: bool = False) -> bool:
    """Whether gloo can carry the collectives: PyTorch, which brings it, is installed."""
    return find_spec("torch") is not None


def gloo_enabled() -> bool:
    """Whether gloo carries the collectives."""
    return gloo_built()


def nccl_built(verbose: bool = False) -> int:
    """Return 1 if tensors on GPUs are reduced by NCCL, which PyTorch brings; else 0."""
    if not gloo_built():
        return 0
    from torch import distributed

    return int(distributed.is_nccl_available())


def cuda_built(verbose: bool = False) -> bool:
    """Whether PyTorch is one for CUDA."""
    return gloo_built() and getattr(import_module("torch.version"), "cuda", None) is not None


def rocm_built(verbose: bool = False) -> bool:
    """Whether PyTorch is one for ROCm."""
    return gloo_built() and getattr(import_module("torch.version"), "hip", None) is not None


def mpi_built(verbose: bool = False) -> bool:
    """Return False: there is no MPI, no DDL and no oneCCL."""
    return False


mpi_enabled = mpi_threads_supported = ddl_built = ccl_built = mpi_built
