"""What a node's child takes of its machine: cores, memory, GPUs; and how full its feeds are.

Runs in: agent
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import psutil

from sparkdl.control.messages import NodeLoad
from sparkdl.core.throttle import period_s
from sparkdl.node.gpus import open_nvml

_PERIOD_S = 2.0
_RESCAN = 5
"""Looks between searches for the child's own processes, each of which reads all of the host's."""


class LoadWatch:
    """Reports every two seconds, more seldom from many nodes. Runs on the agent's loop.

    Args:
        gpus: the UUIDs of those that the child uses.
        feed_nbytes: returns how many bytes of rows wait, and how many may.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        report: Callable[[NodeLoad], None],
        nodes: int,
        gpus: Sequence[str],
        feed_nbytes: Callable[[], tuple[int, int]],
    ) -> None:
        self._loop = loop
        self._report = report
        self._period_s = period_s(_PERIOD_S, nodes)
        self._gpus = tuple(gpus)
        self._feed_nbytes = feed_nbytes
        self._processes: list[psutil.Process] = []
        self._pid = self._looks = 0
        self._timer: asyncio.TimerHandle | None = None

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
        self._timer = self._loop.call_later(self._period_s, self._look)
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
        self._report(NodeLoad(cores, int(nbytes), used, limit, busy, gpu_nbytes))

    def _find_processes(self) -> None:
        known = {process: process for process in self._processes}
        self._processes = []
        with suppress(psutil.Error):
            child = psutil.Process(self._pid)
            found = [child, *child.children(recursive=True)]
            self._processes = [known.get(process, process) for process in found]


def _gpu_load(uuids: Sequence[str]) -> tuple[float, int]:
    """Return the mean share of time in which these GPUs were busy, and the bytes in use on them."""
    if not uuids:
        return 0.0, 0
    busy, nbytes = 0.0, 0
    with suppress(Exception), open_nvml() as nvml:  # numbers to look at; training needs none
        for uuid in uuids:
            handle: Any = nvml.nvmlDeviceGetHandleByUUID(uuid)
            nbytes += int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
            with suppress(nvml.NVMLError):  # instances of a split GPU do not tell
                busy += nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 / len(uuids)
    return busy, nbytes
