"""The load of a node's child on its machine: cores, memory, GPUs; and how full its feeds are.

Network traffic is counted for a host, or for a container with a network of its own, but not for a
process; so nodes of one host report the same.

Runs in: agent
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import psutil

from sparkdl.control.messages import NodeLoad
from sparkdl.node.gpus import open_nvml

_PERIOD_S = 2.0
_MIN_SPAN_S = 0.1
_RESCAN = 5
"""Looks between searches for the child's processes: a search reads all processes of the host."""


class LoadWatch:
    """Reports every two seconds. Runs on the agent's loop.

    Args:
        gpus: the GPUs that the child uses: UUIDs, or numbers in nvidia-smi's order.
        feed_nbytes: returns how many bytes of rows wait, and how many may.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        report: Callable[[NodeLoad], None],
        gpus: Sequence[str],
        feed_nbytes: Callable[[], tuple[int, int]],
    ) -> None:
        self._loop = loop
        self._report = report
        self._gpus = tuple(gpus)
        self._feed_nbytes = feed_nbytes
        self._processes: list[psutil.Process] = []
        self._pid = self._looks = 0
        self._timer: asyncio.TimerHandle | None = None
        self._carried, self._carried_s = _carried_nbytes(), loop.time()

    def begin(self, pid: int) -> None:
        """Watch another child."""
        self._pid, self._looks = pid, 0
        if self._timer is None:
            self._look()

    def close(self) -> None:
        """Report nothing more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = self._loop.call_later(_PERIOD_S, self._look)
        if self._looks % _RESCAN == 0:
            self._find_processes()
        self._looks += 1
        cores = nbytes = 0.0
        for process in self._processes:
            with suppress(psutil.Error):  # it has ended; another one begins, or the agent ends
                cores += process.cpu_percent(None) / 100  # since the last look
                nbytes += process.memory_info().rss
        used, limit = self._feed_nbytes()
        busy, gpu_nbytes = _gpu_load(self._gpus)
        carried = self._carried_since()
        self._report(NodeLoad(cores, int(nbytes), used, limit, busy, gpu_nbytes, *carried))

    def _carried_since(self) -> tuple[int, int]:
        """Return the bytes a second that the network has brought and taken since the last look."""
        before, before_s = self._carried, self._carried_s
        self._carried, self._carried_s = _carried_nbytes(), self._loop.time()
        span_s = max(self._carried_s - before_s, _MIN_SPAN_S)
        received, sent = (
            max(0, int((now - then) / span_s))  # an interface that goes takes its count along
            for now, then in zip(self._carried, before, strict=True)
        )
        return received, sent

    def _find_processes(self) -> None:
        known = {process: process for process in self._processes}
        self._processes = []
        with suppress(psutil.Error):
            child = psutil.Process(self._pid)
            found = [child, *child.children(recursive=True)]
            # psutil measures CPU time between two calls of one object: a new object would report 0
            # first.
            self._processes = [known.get(process, process) for process in found]


def _carried_nbytes() -> tuple[int, int]:
    """Return the bytes that this host has received and sent since it is up, except to itself."""
    with suppress(OSError, RuntimeError):  # numbers to look at; training needs none
        found = psutil.net_io_counters(pernic=True)
        own = [count for name, count in found.items() if not name.startswith("lo")]
        return sum(count.bytes_recv for count in own), sum(count.bytes_sent for count in own)
    return 0, 0


def _gpu_load(gpus: Sequence[str]) -> tuple[float, int]:
    """Return the mean share of time in which these GPUs were busy, and the bytes in use on them."""
    if not gpus:
        return 0.0, 0
    busy, nbytes = 0.0, 0
    with suppress(Exception), open_nvml() as nvml:  # numbers to look at; training needs none
        for gpu in gpus:
            is_number = gpu.isdigit()  # as Spark assigns them; NVML counts like nvidia-smi
            by = nvml.nvmlDeviceGetHandleByIndex if is_number else nvml.nvmlDeviceGetHandleByUUID
            handle: Any = by(int(gpu) if is_number else gpu)
            nbytes += int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
            with suppress(nvml.NVMLError):  # instances of a split GPU do not report it
                busy += nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 / len(gpus)
    return busy, nbytes
