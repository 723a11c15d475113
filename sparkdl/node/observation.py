"""Reports to the driver on a node's child beside its rows: prints, steps, load, stacks.

Runs in: agent
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import psutil
from msgspec.structs import replace

from sparkdl.control.channel import Consumed, Local, Reported, Waited
from sparkdl.control.messages import Fetch, Fetched, FromAgent, LogLines, NodeActive, NodeLoad
from sparkdl.core.throttle import Throttle
from sparkdl.node.error_lines import marked_in, unmarked
from sparkdl.node.gpus import open_nvml
from sparkdl.node.spec import AgentSpec
from sparkdl.node.supervisor import ChildLog, NodeChild

PERIOD_S = 0.1
"""Steps go to the coordinator this often at most."""
_MAX_LOG_PERIOD_S = 10.0
_LOG_PERIOD_S = 0.25
"""A child's output goes to the driver this often at most."""


class Observation:
    """All that is seen of a node's child beside its feeds. Runs on the agent's loop.

    Args:
        report: sends to the driver.
        feed_nbytes: returns how many bytes of rows wait, and how many may.
    """

    def __init__(
        self,
        agent_spec: AgentSpec,
        child: NodeChild,
        report: Callable[[FromAgent], None],
        feed_nbytes: Callable[[], tuple[int, int]],
    ) -> None:
        spec, loop = agent_spec.spec, asyncio.get_running_loop()
        log_s = log_period_s(spec.settings.recovery.hang_timeout_s)
        self._spec, self._child, self._report = spec, child, report
        self._activity = Activity(loop, report, log_s)
        self._lines = Throttle(loop, self._stream_log, _LOG_PERIOD_S)
        self._load = LoadWatch(loop, report, child.gpus, feed_nbytes)

    def begin(self) -> None:
        log = self._child.process.log
        self._activity.begin(self._child.generation, log)
        log.watch(asyncio.get_running_loop(), self._on_print)
        self._on_print()  # report the lines printed so far
        if self._spec.is_watched:
            self._load.begin(lambda: self._child.process.pid)

    def note(self, message: Local) -> None:
        self._activity.note(message)

    def answer(self, question: Fetch) -> None:
        process, number = self._child.process, question.request
        if question.lines is not None:
            self._report(Fetched("\n".join(process.log.tail(question.lines)), number))
            return
        loop = asyncio.get_running_loop()
        process.stacks.ask(loop, process.pid, lambda it: self._report(Fetched(it, number)))

    def end(self) -> None:
        # All of them now: the next child of this node has a log of its own.
        while self._streams_log and self._report_lines(is_last=True):
            pass
        self._report(Fetched("\n".join(self._child.process.log.tail())))

    def close(self) -> None:
        self._activity.close()
        self._lines.cancel()
        self._load.close()

    @property
    def _streams_log(self) -> bool:
        prints = self._spec.prints
        return prints == "all" or (prints == "first" and self._child.rank == 0)

    def _on_print(self) -> None:
        self._activity.printed()
        if self._streams_log:
            self._lines.request()

    def _stream_log(self) -> None:
        if self._report_lines():  # after a burst the others follow
            self._lines.request()

    def _report_lines(self, is_last: bool = False) -> bool:
        if lines := self._child.process.log.new_lines(is_last):
            self._report(LogLines(tuple(map(unmarked, lines)), marked_in(lines)))
        return bool(lines)


_PERIOD_S = 2.0
_RESCAN = 5
"""Looks between searches for the child's processes: a search reads all processes of the host."""


class LoadWatch:
    """Reports every two seconds. Runs on the agent's loop."""

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

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def begin(self, pid: Callable[[], int]) -> None:
        """Report from now on; `pid` returns that of the child, 0 while there is none."""
        if self._timer is None:
            self._look(pid)

    def _look(self, pid: Callable[[], int]) -> None:
        self._timer = self._loop.call_later(_PERIOD_S, self._look, pid)
        if self._looks % _RESCAN == 0 or self._pid != pid():
            self._pid = pid()
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
        with suppress(psutil.Error):  # as for the number 0
            child = psutil.Process(self._pid)
            found = [child, *child.children(recursive=True)]
            # psutil measures between two calls of one object: a new one would report 0 first.
            self._processes = [known.get(process, process) for process in found]


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


def log_period_s(hang_timeout_s: float | None) -> float:
    """Return how often to tell the hang watch that a child prints."""
    return min(_MAX_LOG_PERIOD_S, (hang_timeout_s or math.inf) / 4)


class Activity:
    """A child's prints, steps and waits. Runs on the agent's loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        report: Callable[[NodeActive], None],
        log_period_s: float,
    ) -> None:
        self._report = report
        self._now = self._reported = NodeActive(0)
        self._log: ChildLog | None = None
        self._own: dict[str, int] = {}
        """Batches of the files that the child reads itself, by feed."""
        self._changes = Throttle(loop, self._report_now, PERIOD_S)
        self._prints = Throttle(loop, self._note_print, log_period_s)

    def begin(self, generation: int, log: ChildLog) -> None:
        self._now = self._reported = NodeActive(generation)
        self._own.clear()
        self._log = log

    def note(self, message: Local) -> None:
        now = self._now
        match message:
            case Reported(step, metrics):
                now = replace(now, step=step, metrics=metrics)
            case Waited(watched_s, rows_s, others_s):
                now = replace(now, watched_s=watched_s, rows_s=rows_s, others_s=others_s)
            case Consumed(feed, is_own=True):
                self._own[feed] = message.given.steps
                now = replace(now, batches=sum(self._own.values()))
            case _:
                return
        self._change(now)

    def printed(self) -> None:
        self._prints.request()

    def close(self) -> None:
        self._changes.cancel()
        self._prints.cancel()

    def _change(self, now: NodeActive) -> None:
        self._now = now
        if now != self._reported:
            self._changes.request()

    def _report_now(self) -> None:
        self._reported = self._now
        self._report(self._now)

    def _note_print(self) -> None:
        if self._log is not None:
            self._change(replace(self._now, log_nbytes=self._log.nbytes()))
