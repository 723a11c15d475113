"""The GPUs a node's child sees: assigned by Spark, or claimed here by its agent.

Runs in: agent, driver, feeder

The GPUs of the host are listed by NVIDIA's library NVML, through the package `nvidia-ml-py` (the
extra `gpu`): https://docs.nvidia.com/deploy/nvml-api/

A claim is a Unix socket bound to an abstract name with the GPU's UUID in it (unix(7)). The kernel
gives a name to a single process of the host, of any user, and frees it when that process ends, even
by a crash. Abstract names are visible within one network namespace. See docs/deployment.md.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkdl.core.errors import FrameworkMissingError, SparkConfigError
from sparkdl.core.settings import Environment, executors_gpus, visible_gpus
from sparkdl.core.texts import docs_page

_DEVICES = ("/dev/nvidiactl", "/dev/dxg")  # Linux, Windows' subsystem for Linux
_NAME = "sparkdl-gpu-{}"
_ADVICE = "Ask for fewer (num_gpus=0 for none)"


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        uuid: which CUDA_VISIBLE_DEVICES takes in whatever order devices are.
        pids: the processes that compute on it. Other containers' may be missing.
        index: its number, as nvidia-smi counts.
    """

    uuid: str
    name: str
    pids: tuple[int, ...] = ()
    index: int = 0


@dataclass(frozen=True)
class GpuShare:
    """A child's share of its host's GPUs; the claims hold until `close` or this process's end.

    Attributes:
        environment: for the child.
        note: what its user should know, a line for its log.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    claims: tuple[socket.socket, ...] = ()

    def close(self) -> None:
        for claim in self.claims:
            claim.close()


# Empty hides all GPUs from CUDA. Without the variable a process sees all.
NONE = GpuShare({"CUDA_VISIBLE_DEVICES": ""})


def has_driver() -> bool:
    return any(Path(device).exists() for device in _DEVICES)


@contextmanager
def open_nvml() -> Iterator[Any]:
    try:
        import pynvml
    except ImportError:
        raise FrameworkMissingError(
            "GPUs are found by the package nvidia-ml-py, which this Python does not have; "
            "pip install nvidia-ml-py on the executors"
        ) from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise FrameworkMissingError(
            f"the NVIDIA driver of this host does not answer: {error}"
        ) from None
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def list_gpus(nvml: Any) -> list[Gpu]:
    """Return the GPUs in nvidia-smi's order, without those that a container or a cgroup hides."""
    found: list[Gpu] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        with suppress(nvml.NVMLError):  # a hidden one; the others keep nvidia-smi's numbers
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid, name = str(nvml.nvmlDeviceGetUUID(handle)), str(nvml.nvmlDeviceGetName(handle))
            pids: tuple[int, ...] = ()
            with suppress(nvml.NVMLError):  # some virtual GPUs do not report it
                running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
                pids = tuple(int(one.pid) for one in running)
            found.append(Gpu(uuid, name, pids, index))
    return found


def allowed_gpus(gpus: Sequence[Gpu], visible: tuple[str, ...] | None) -> list[Gpu]:
    """Return those of `gpus` that CUDA_VISIBLE_DEVICES names, in its order.

    As CUDA does, it ends at the first entry that names none, and takes the first digits of a UUID
    for the whole. An instance of a split GPU (MIG) is what its name says.
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables

    Args:
        visible: the entries; `None` where the variable is not set.
    """
    if visible is None:
        return list(gpus)
    found: list[Gpu] = []
    for entry in visible:
        meant = [
            gpu
            for gpu in gpus
            if (gpu.index == int(entry) if entry.isdigit() else gpu.uuid.startswith(entry))
        ]
        if not meant and entry.startswith("MIG-"):
            meant = [Gpu(entry, "MIG")]
        if not meant:
            break
        found += [gpu for gpu in meant if gpu not in found]
    return found


def claim_gpu(name: str) -> socket.socket | None:
    """Claim a GPU of this host; `None` if it is claimed already. The claim holds until closed."""
    return claim_name(_NAME.format(name))


def claim_name(name: str) -> socket.socket | None:
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0{name}")
    except OSError as error:
        claim.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return claim


def is_claimed(name: str) -> bool:
    claimed = f"@{_NAME.format(name)}"
    return any(line.endswith(claimed) for line in Path("/proc/net/unix").read_text().splitlines())


def split_gpus(assigned: Sequence[str], nodes: int) -> list[tuple[str, ...]]:
    """Share out a Spark task's GPUs to the nodes inside it, none to two of them."""
    size = len(assigned) // max(1, nodes)
    return [tuple(assigned[size * i : size * (i + 1)]) for i in range(nodes)]


def owned_gpus(assigned: Sequence[str], environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the GPUs that Spark assigned, as CUDA_VISIBLE_DEVICES names them.

    A number is a place among the GPUs that the executor sees, as in pyspark's distributors: with
    CUDA_VISIBLE_DEVICES=4,5 on the executor, Spark's GPU 1 is 5.

    Returns:
        None of them where the executor's variable hides all GPUs.
    """
    visible = executors_gpus(environ)
    if not visible:
        return tuple(assigned) if visible is None else ()
    unseen = [each for each in assigned if each.isdigit() and int(each) >= len(visible)]
    if unseen:
        raise SparkConfigError(
            f"Spark assigned GPU {', '.join(unseen)}, and the executor on host "
            f"{socket.gethostname()} sees {len(visible)} GPUs (CUDA_VISIBLE_DEVICES="
            f"{','.join(visible)!r}). Spark's numbers count these from 0: have the discovery "
            "script print that many, or unset CUDA_VISIBLE_DEVICES on the executor"
        )
    return tuple(visible[int(each)] if each.isdigit() else each for each in assigned)


def share_gpus(
    wanted: int | None,
    assigned: tuple[str, ...] | None,
    who: str,
    environ: Mapping[str, str] = os.environ,
) -> GpuShare:
    """Return the GPUs of one node.

    Args:
        wanted: how many; `None` for all that Spark assigned, or else for one where there are any.
        assigned: addresses that Spark assigned to the node's task; `None` where it assigns none.
        who: the node, for errors.
        environ: of the executor: its CUDA_VISIBLE_DEVICES says which may be claimed, and which
            GPU each of Spark's addresses means.
    """
    if wanted == 0:
        return NONE
    if assigned is not None:
        return _assigned_share(wanted, assigned, who, environ)
    if wanted is None:
        if not has_driver() or visible_gpus(environ) == ():
            return GpuShare()
        # Pods have networks of their own, so one does not see the claims of another.
        if Environment.read(environ).is_pod:
            note = "no GPU: Spark assigned none to this pod's task. Ask with num_gpus, see "
            return GpuShare(NONE.environment, note + docs_page("deployment", "gpus"))
    try:
        with open_nvml() as nvml:
            gpus = allowed_gpus(list_gpus(nvml), visible_gpus(environ))
    except FrameworkMissingError as error:
        # The user asked for no GPU: the default must not fail a node for want of NVML.
        if wanted is None:
            seen = "GPUs are not shared out, and this node sees all of its host's"
            return GpuShare(note=f"{seen}: {error}")
        if not has_driver():
            raise SparkConfigError(
                f"{_need(wanted, who)}: the host has no NVIDIA driver. {_ADVICE}, or run the nodes "
                "on hosts with GPUs"
            ) from None
        raise FrameworkMissingError(f"{_need(wanted, who)}: {error}. {_ADVICE}") from None
    return _claimed_share(1 if wanted is None else wanted, gpus, who, environ)


def _assigned_share(
    wanted: int | None, assigned: tuple[str, ...], who: str, environ: Mapping[str, str]
) -> GpuShare:
    owned = owned_gpus(assigned[:wanted], environ)
    if wanted is not None and wanted > len(owned):
        raise SparkConfigError(
            f"{_need(wanted, who)}: Spark assigned {', '.join(assigned) or 'none'} to its task, of "
            f"which CUDA_VISIBLE_DEVICES of its executor shows {len(owned)}. Lower num_gpus, or "
            "raise spark.task.resource.gpu.amount and spark.executor.resource.gpu.amount"
        )
    # Spark's numbers are nvidia-smi's, which are in the order of the PCI bus; CUDA's own need not.
    seen = {"CUDA_VISIBLE_DEVICES": ",".join(owned), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return GpuShare(seen)


def _claimed_share(
    count: int, gpus: Sequence[Gpu], who: str, environ: Mapping[str, str]
) -> GpuShare:
    claims = _claim([gpu.uuid for gpu in gpus if not gpu.pids], count)
    if claims is not None:
        seen = {"CUDA_VISIBLE_DEVICES": ",".join(claims)}
        return GpuShare(seen, claims=tuple(claims.values()))
    free = sum(not gpu.pids and not is_claimed(gpu.uuid) for gpu in gpus)
    visible = visible_gpus(environ)
    limit = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={','.join(visible)})"
    raise SparkConfigError(
        f"{_need(count, who)}: {len(gpus)} found{limit}, {free} free. {_ADVICE}, have fewer nodes "
        "on a host, end what computes there, or have Spark assign GPUs "
        f"({docs_page('deployment', 'gpus')})"
    )


def _claim(names: Sequence[str], count: int) -> dict[str, socket.socket] | None:
    with ExitStack() as held:
        claims: dict[str, socket.socket] = {}
        for name in names:
            if len(claims) < count and (claim := claim_gpu(name)):
                claims[name] = held.enter_context(claim)
        if len(claims) < count:
            return None
        held.pop_all()
        return claims


def _need(count: int, who: str) -> str:
    return f"{who} on host {socket.gethostname()} needs {count} of its GPUs (num_gpus={count})"
