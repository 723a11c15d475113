"""The GPUs a node's child sees: assigned by Spark, or claimed here by its agent.

Runs in: agent, driver, feeder

The GPUs of the host are listed by NVIDIA's library NVML, through the package `nvidia-ml-py` (the
extra `gpu`): https://docs.nvidia.com/deploy/nvml-api/

A claim is a Unix socket bound to an abstract name with the GPU's UUID in it (unix(7)). The kernel
gives a name to a single process of the host, of any user, and frees it when that process ends, even
by a crash: no file is left behind, and no permission is needed. Abstract names are visible within
one network namespace. Containers with networks of their own do not see each other's claims;
processes that compute and memory in use are seen all the same. See docs/gpus.md.
"""

from __future__ import annotations

import errno
import os
import random
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkdl.control.descriptors import peer_of
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import FrameworkMissingError, SparkConfigError
from sparkdl.core.links import docs_page
from sparkdl.core.settings import Environment, executors_gpus, visible_gpus

_DEVICES = ("/dev/nvidiactl", "/dev/dxg")  # Linux, Windows' subsystem for Linux


@dataclass(frozen=True)
class Gpu:
    """A GPU, or an instance of one that is split (MIG).

    Attributes:
        uuid: `GPU-…` or `MIG-…`, which CUDA_VISIBLE_DEVICES takes in whatever order devices are.
        name: of the product.
        pids: the processes that compute on it. Other containers' may be missing.
        index: its number, as nvidia-smi counts; an instance has that of its GPU.
        used_nbytes: of its memory, by all processes; 0 where its driver does not report it.
    """

    uuid: str
    name: str
    pids: tuple[int, ...] = ()
    index: int = 0
    used_nbytes: int = 0


def has_driver(devices: Sequence[str] = _DEVICES) -> bool:
    """Whether this host has an NVIDIA driver, as far as this process may see."""
    return any(Path(device).exists() for device in devices)


@contextmanager
def open_nvml() -> Iterator[Any]:
    """Open NVML.

    Raises:
        FrameworkMissingError: if the package, the library or its driver is missing.
    """
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
    """Return the GPUs in nvidia-smi's order; of one that is split, its instances.

    GPUs that a container or a cgroup hides from this process are left out.
    """
    found: list[Gpu] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        with suppress(nvml.NVMLError):
            # A hidden GPU raises here. The others keep the numbers that nvidia-smi and Spark count
            # by.
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name = str(nvml.nvmlDeviceGetName(handle))
            parts = _instances(nvml, handle) or [handle]
            found += [_gpu(nvml, part, name, index) for part in parts]
    return found


def _instances(nvml: Any, handle: Any) -> list[Any]:
    instances = []
    with suppress(nvml.NVMLError):  # a GPU that cannot be split
        if nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE:
            for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
                with suppress(nvml.NVMLError):  # there need not be one of each number
                    instances.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
    return instances


def _gpu(nvml: Any, handle: Any, name: str, index: int) -> Gpu:
    pids: tuple[int, ...] = ()
    used_nbytes = 0
    with suppress(nvml.NVMLError):  # some virtual GPUs do not report it
        pids = tuple(int(one.pid) for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    with suppress(nvml.NVMLError):  # where CPU and GPU share their memory
        used_nbytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
    return Gpu(str(nvml.nvmlDeviceGetUUID(handle)), name, pids, index, used_nbytes)


CLAIM_WAIT_S = 5.0
"""How long GPUs are waited for: a node that has just ended may not have let go of its own yet."""
_POLL_S = 0.2
_ADVICE = "Ask for fewer (num_gpus=0 for none)"
_NAME = "\0sparkdl-gpu-{}"


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
        """Let others have the GPUs."""
        for claim in self.claims:
            claim.close()


FREE = "free"
# Empty hides all GPUs from CUDA. Without the variable a process sees all.
NONE = GpuShare({"CUDA_VISIBLE_DEVICES": ""})


def share_gpus(
    wanted: int | None,
    assigned: tuple[str, ...] | None,
    who: str,
    environ: Mapping[str, str] = os.environ,
    wait_s: float = CLAIM_WAIT_S,
) -> GpuShare:
    """Return the GPUs of one node.

    Args:
        wanted: how many; `None` for all that Spark assigned, or else for one where there are any.
        assigned: addresses that Spark assigned to the node's task; `None` where it assigns none.
        who: the node, for errors.
        environ: of the executor: its CUDA_VISIBLE_DEVICES says which may be claimed, and which
            GPU each of Spark's addresses means.
        wait_s: how long to wait for GPUs to become free.

    Raises:
        SparkConfigError: if there are fewer than wanted.
        FrameworkMissingError: if so many are wanted, and the means to find them are missing.
    """
    if wanted == 0:
        return NONE
    if assigned is not None:
        return _assigned_share(wanted, assigned, who, environ)
    if wanted is not None:
        return _claimed_share(wanted, who, f"num_gpus={wanted}", environ, wait_s)
    if not has_driver() or visible_gpus(environ) == ():
        return GpuShare()
    # Pods have networks of their own, so one does not see the claims of another.
    if Environment.read(environ).is_pod:
        note = "no GPU: Spark assigned none to this pod's task. Ask with num_gpus, see "
        return GpuShare(NONE.environment, note + docs_page("gpus"))
    try:
        return _claimed_share(1, who, "the default without Spark's own GPUs", environ, wait_s)
    except FrameworkMissingError as error:
        # The user asked for no GPU: the default must not fail a node for want of NVML.
        seen = "GPUs are not shared out, and this node sees all of its host's"
        return GpuShare(note=f"{seen}: {error}")


def split_gpus(assigned: Sequence[str], nodes: int) -> list[tuple[str, ...]]:
    """Share out a Spark task's GPUs to the nodes inside it, none to two of them."""
    size = len(assigned) // max(1, nodes)
    return [tuple(assigned[size * i : size * (i + 1)]) for i in range(nodes)]


def allowed_gpus(gpus: Sequence[Gpu], visible: tuple[str, ...] | None) -> list[Gpu]:
    """Return those of `gpus` that CUDA_VISIBLE_DEVICES names, in its order.

    As CUDA does, it ends at the first entry that names none, and takes the first digits of a UUID
    for the whole. https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables

    Args:
        visible: the entries; `None` where the variable is not set.
    """
    if visible is None:
        return list(gpus)
    found: list[Gpu] = []
    for entry in visible:
        meant = [gpu for gpu in gpus if _is_meant(gpu, entry)]
        if not meant:
            break
        found += [gpu for gpu in meant if gpu not in found]
    return found


def claim_gpu(uuid: str) -> socket.socket | None:
    """Claim a GPU of this host; `None` if it is claimed already. The claim holds until closed."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(_NAME.format(uuid))
        claim.listen()  # so that others can ask who has it
    except OSError as error:
        claim.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return claim


def claimant_of(uuid: str) -> int | None:
    """Return the process that has claimed a GPU: `None` if none has, 0 if it is unknown."""
    with socket.socket(socket.AF_UNIX) as asking:
        # A claimant never accepts, and its backlog may be full: a blocking connect would hang.
        asking.setblocking(False)
        try:
            asking.connect(_NAME.format(uuid))
            return peer_of(asking).pid
        except ConnectionRefusedError:
            return None
        except OSError:
            return 0


def owned_gpus(assigned: Sequence[str], environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the GPUs that Spark assigned, as CUDA_VISIBLE_DEVICES names them.

    A number is a place among the GPUs that the executor sees, as in pyspark's distributors: with
    CUDA_VISIBLE_DEVICES=4,5 on the executor, Spark's GPU 1 is 5.

    Returns:
        None of them where the executor's variable hides all GPUs.

    Raises:
        SparkConfigError: if the executor sees some GPUs, but not one of these.
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
            "script print so many, or unset CUDA_VISIBLE_DEVICES on the executor"
        )
    return tuple(visible[int(each)] if each.isdigit() else each for each in assigned)


def _assigned_share(
    wanted: int | None, assigned: tuple[str, ...], who: str, environ: Mapping[str, str]
) -> GpuShare:
    if wanted is not None and wanted > len(assigned):
        raise SparkConfigError(
            f"{who} on host {socket.gethostname()} was to have {wanted} GPUs (num_gpus={wanted}), "
            f"and Spark assigned {len(assigned)} to its task: {', '.join(assigned) or 'none'}. "
            "Lower num_gpus, or raise spark.task.resource.gpu.amount and "
            "spark.executor.resource.gpu.amount"
        )
    # Spark's numbers are nvidia-smi's, which are in the order of the PCI bus; CUDA's own need not.
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    owned = owned_gpus(assigned[:wanted], environ)
    if wanted and not owned:
        raise SparkConfigError(
            f"{_wish(wanted, who, f'num_gpus={wanted}')}, and CUDA_VISIBLE_DEVICES of its executor "
            "hides all: unset it there, or set num_gpus=0"
        )
    return GpuShare({"CUDA_VISIBLE_DEVICES": ",".join(owned), **order})


def _claimed_share(
    count: int, who: str, why: str, environ: Mapping[str, str], wait_s: float
) -> GpuShare:
    deadline, pause = Deadline.after(wait_s), threading.Event()
    visible = visible_gpus(environ)
    with ExitStack() as stack:
        try:
            nvml = stack.enter_context(open_nvml())
        except FrameworkMissingError as error:
            if not has_driver():
                raise SparkConfigError(
                    f"{_wish(count, who, why)}, and this host has no NVIDIA driver: set "
                    "num_gpus=0, or run the nodes on hosts with GPUs"
                ) from None
            raise FrameworkMissingError(
                f"{_wish(count, who, why)}, but the free ones are unknown: {error}. {_ADVICE}"
            ) from None
        while True:
            gpus = allowed_gpus(list_gpus(nvml), visible)
            claims = _claim(gpus, count)
            if claims:
                seen = {"CUDA_VISIBLE_DEVICES": ",".join(claims)}
                return GpuShare(seen, claims=tuple(claims.values()))
            # More GPUs than the host has will not come, however long the wait.
            if deadline.has_passed or len(gpus) < count:
                raise SparkConfigError(_lack(count, gpus, who, why, visible))
            # Jitter, so that agents that want the same GPUs do not collide again.
            # The kernel reports no release of a name, so this asks again and again.
            pause.wait(min(_POLL_S * random.uniform(0.5, 1.5), deadline.remaining_s))


def _claim(gpus: Sequence[Gpu], count: int) -> dict[str, socket.socket]:
    """Claim `count` GPUs without processes, or none; GPUs with memory in use come last."""
    idle = sorted((gpu for gpu in gpus if not gpu.pids), key=lambda gpu: gpu.used_nbytes >> 30)
    with ExitStack() as held:
        claims: dict[str, socket.socket] = {}
        for place, gpu in enumerate(idle):
            # With too few left, further claims would only keep another node from its GPUs.
            if len(claims) == count or len(claims) + len(idle) - place < count:
                break
            claim = claim_gpu(gpu.uuid)
            if claim is not None:
                claims[gpu.uuid] = held.enter_context(claim)
        # All or none: two nodes that each hold half of the GPUs would wait for each other.
        if len(claims) < count:
            return {}
        held.pop_all()
        return claims


def _is_meant(gpu: Gpu, entry: str) -> bool:
    return gpu.index == int(entry) if entry.isdigit() else gpu.uuid.startswith(entry)


def _lack(
    count: int, gpus: Sequence[Gpu], who: str, why: str, visible: tuple[str, ...] | None
) -> str:
    states = [(gpu, state_of(gpu)) for gpu in gpus]
    lines = "".join(f"\n  {gpu.uuid} ({gpu.name}): {state}" for gpu, state in states)
    free = sum(state == FREE for _gpu, state in states)
    limit = "" if visible is None else f"\nCUDA_VISIBLE_DEVICES={','.join(visible)} limits it."
    return (
        f"{_wish(count, who, why)}, and it has {len(gpus)}, of which {free} are free:"
        f"{lines or ' none at all.'}{limit}\n{_ADVICE}, have fewer nodes on a host, end what "
        f"computes there, or have Spark assign GPUs ({docs_page('gpus')})"
    )


def _wish(count: int, who: str, why: str) -> str:
    return f"{who} on host {socket.gethostname()} was to have {count} of its GPUs ({why})"


def state_of(gpu: Gpu) -> str:
    """Return `FREE`, or in words which process has it."""
    claimant = claimant_of(gpu.uuid)
    if claimant is not None:
        return f"claimed by the node of process {claimant or 'unknown'}"
    return f"processes {list(gpu.pids)} compute on it" if gpu.pids else FREE
