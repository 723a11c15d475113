"""The NVIDIA GPUs of this host, as the driver's own library (NVML) lists them.

Runs in: anywhere

It is asked through the package `nvidia-ml-py`, the extra `gpu`.
https://docs.nvidia.com/deploy/nvml-api/
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkdl.core.errors import FrameworkMissingError

_DEVICES = ("/dev/nvidiactl", "/dev/dxg")  # Linux, Windows' subsystem for Linux


@dataclass(frozen=True)
class Gpu:
    """A GPU, or an instance of one that is split (MIG).

    Attributes:
        uuid: `GPU-…` or `MIG-…`, which CUDA_VISIBLE_DEVICES takes in whatever order devices are.
        name: of the product.
        pids: the processes that compute on it. Those of other containers may be missing.
        index: its number, as nvidia-smi counts; an instance has that of its GPU.
        used_nbytes: of its memory, by whomever; 0 where the driver does not tell.
    """

    uuid: str
    name: str
    pids: tuple[int, ...] = ()
    index: int = 0
    used_nbytes: int = 0


def has_driver() -> bool:
    """Whether this host has an NVIDIA driver, as far as this process may see."""
    return any(Path(device).exists() for device in _DEVICES)


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
            "pip install nvidia-ml-py (or sparkdl-cluster[gpu]) on the executors"
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

    What a container or a cgroup keeps from this process is left out.
    """
    found: list[Gpu] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        with suppress(nvml.NVMLError):
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
    with suppress(nvml.NVMLError):  # some virtual GPUs do not tell
        pids = tuple(int(one.pid) for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    with suppress(nvml.NVMLError):  # where CPU and GPU share their memory
        used_nbytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
    return Gpu(str(nvml.nvmlDeviceGetUUID(handle)), name, pids, index, used_nbytes)
