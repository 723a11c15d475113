"""Which processes belong to a contestant, and what they use, by what Linux says in `/proc`.

Only the standard library is imported: this runs inside the nodes too and must cost them nothing.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

MARK = "BENCH_RUN"
"""The environment variable by which a contestant's processes are known, whatever their group."""
_TICKS = os.sysconf("SC_CLK_TCK")


def marked(token: str) -> dict[int, str]:
    """Return the processes that inherited `token`: their commands by process id."""
    needle = f"{MARK}={token}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    words = (
                        (entry / "cmdline")
                        .read_bytes()
                        .replace(b"\0", b" ")
                        .decode(errors="replace")
                    )
                    found[int(entry.name)] = words.strip()[:200]
    return found


def cpu_s() -> float:
    """Return the CPU time, user and system, of all processes of this contestant so far.

    Of those that have ended, what their parents have taken note of.
    """
    total = 0
    for pid in marked(os.environ.get(MARK, "")):
        with contextlib.suppress(OSError):
            total += sum(map(int, _stat(pid)[11:15]))
    return total / _TICKS


def own_cpu_s(pids: Iterable[int]) -> dict[str, float]:
    """Return the CPU time of each process, without its children's, by its number and its start."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = _stat(pid)
            found[f"{pid} {fields[19]}"] = sum(map(int, fields[11:13])) / _TICKS
    return found


def _stat(pid: int) -> list[str]:
    """Return what `/proc/PID/stat` has after the command, which may hold blanks; see proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


@dataclass
class Peaks:
    """The most memory, in bytes, that was seen; `before` is what there was at first.

    Attributes:
        rss: Resident pages, shared ones included.
        pss: The same with each shared page divided by the number of its users; 0 if not readable.
    """

    rss_before: int = 0
    pss_before: int = 0
    rss: int = 0
    pss: int = 0


@dataclass
class Memory:
    """What was seen of the agents, the children, and the anonymous files with segments."""

    agents: dict[int, Peaks] = field(default_factory=dict)
    children: dict[int, Peaks] = field(default_factory=dict)
    segments: dict[int, int] = field(default_factory=dict)
    """The most bytes of segments at one time, by agent."""


class MemoryWatch:
    """Looks at the nodes of this contestant again and again, from enter to exit."""

    def __init__(self, period_s: float = 0.1) -> None:
        self.memory = Memory()
        self._period_s = period_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)

    def __enter__(self) -> MemoryWatch:
        for pid, command in marked(os.environ.get(MARK, "")).items():
            if "sparkdl.node.agent" in command:
                self.memory.agents[pid] = _peaks(pid)
            elif "sparkdl.node.child" in command:
                self.memory.children[pid] = _peaks(pid)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        memory = self.memory
        while not self._is_over.wait(self._period_s):
            for pid in memory.agents:
                memory.segments[pid] = max(memory.segments.get(pid, 0), _segments(pid))
            for pid, peaks in (memory.agents | memory.children).items():
                now = _peaks(pid)
                peaks.rss = max(peaks.rss, now.rss)
                peaks.pss = max(peaks.pss, now.pss)


def _peaks(pid: int) -> Peaks:
    values = {}
    for name in ("status", "smaps_rollup"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/{name}").read_text().splitlines():
                words = line.split()
                if words[0] in ("VmRSS:", "VmHWM:", "Pss:"):
                    values[words[0]] = int(words[1]) * 1024
    rss, pss = values.get("VmRSS:", 0), values.get("Pss:", 0)
    return Peaks(rss, pss, values.get("VmHWM:", 0), pss)


def _segments(pid: int) -> int:
    """Return the bytes of the anonymous memory files that a process holds."""
    sizes = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(entry.path).startswith("/memfd:"):
                    stat = os.stat(entry.path)
                    sizes[stat.st_ino] = stat.st_blocks * 512
    return sum(sizes.values())
