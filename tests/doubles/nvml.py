"""`pynvml` over a list of made-up GPUs: in this process, or in those that import it from a folder.

Runs in: the process of pytest, agent
"""

from __future__ import annotations

import types
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def new_uuid() -> str:
    """Return a UUID that no test of another run on this host uses, for claims are the host's."""
    return f"GPU-{uuid.uuid4()}"


@dataclass(frozen=True, eq=False)
class Device:
    """A GPU.

    Attributes:
        percent: of the time in which it is busy.
        is_ours: whether this process may open it.
    """

    name: str
    pids: tuple[int, ...] = ()
    uuid: str = field(default_factory=new_uuid)
    used_nbytes: int = 0
    percent: int = 0
    is_ours: bool = True


class Nvml(types.ModuleType):
    """`pynvml`, as far as it is asked."""

    class NVMLError(Exception):
        pass

    def __init__(self, *devices: Device, starts: bool = True) -> None:
        super().__init__("pynvml")
        self.devices, self.starts, self.opened = devices, starts, 0

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.starts:
            raise self.NVMLError("Driver Not Loaded")
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Device:  # noqa: N802
        if not self.devices[index].is_ours:
            raise self.NVMLError("Insufficient Permissions")
        return self.devices[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Device:  # noqa: N802
        if found := [device for device in self.devices if device.uuid == uuid]:
            return found[0]
        raise self.NVMLError("Not Found")

    def nvmlDeviceGetUtilizationRates(self, device: Device) -> Any:  # noqa: N802
        return types.SimpleNamespace(gpu=device.percent)

    def nvmlDeviceGetName(self, device: Device) -> str:  # noqa: N802
        return device.name

    def nvmlDeviceGetUUID(self, device: Device) -> str:  # noqa: N802
        return device.uuid

    def nvmlDeviceGetComputeRunningProcesses(self, device: Device) -> list[Any]:  # noqa: N802
        if device.name == "GRID":
            raise self.NVMLError("Not Supported")
        return [types.SimpleNamespace(pid=pid) for pid in device.pids]

    def nvmlDeviceGetMemoryInfo(self, device: Device) -> Any:  # noqa: N802
        if device.name == "NVIDIA GB10":
            raise self.NVMLError("Not Supported")
        return types.SimpleNamespace(used=device.used_nbytes)


def write_pynvml(folder: Path, devices: Sequence[tuple[str, str, tuple[int, ...]]]) -> None:
    """Write a `pynvml` for other processes, over GPUs of these UUIDs, names and processes."""
    made = ", ".join(f"Device({name!r}, {pids!r}, uuid={one!r})" for one, name, pids in devices)
    (folder / "pynvml.py").write_text(
        "import sys\nfrom tests.doubles.nvml import Device, Nvml\n"
        f"sys.modules[__name__] = Nvml({made})\n"
    )
