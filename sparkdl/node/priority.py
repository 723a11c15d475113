"""How a spare stands back: what a training wants of CPU and memory, it gets first.

Runs in: agent

The agent sets this from outside, before the spare has threads, and takes it back for all of them.
Niceness would not do: a process without privileges cannot lower its own again.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

_FIRST_TO_END = "1000"
"""The kernel ends such a process before all others when memory is short: proc_pid_oom_score_adj(5).
Everybody may take back what he has set so."""


def stand_back(pid: int) -> None:
    """Have process `pid`, which has just been started, use what others leave. Linux only.

    It gets idle CPU time alone (SCHED_IDLE), if it may get out of that again, which takes
    CAP_SYS_NICE or RLIMIT_NICE: sched(7). Otherwise it is SCHED_BATCH: it gets its share, and
    does not interrupt another process when it wakes up.
    """
    if sys.platform != "linux":
        return
    with suppress(OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            policy = os.SCHED_IDLE if may_leave_idle() else os.SCHED_BATCH
            os.sched_setscheduler(pid, policy, os.sched_param(0))
    with suppress(OSError):
        _oom_score(pid).write_text(_FIRST_TO_END)


def hurry(pid: int) -> None:
    """Have process `pid` wait for idle CPU time no longer: on a busy host there may be none."""
    if sys.platform == "linux":
        _schedule(pid, os.SCHED_BATCH, os.sched_param(0))


def step_forward(pid: int) -> None:
    """Have process `pid`, with all its threads, be like this one again."""
    if sys.platform != "linux":
        return
    with suppress(OSError):  # it has ended, which its owner notices
        _oom_score(pid).write_text(_oom_score(os.getpid()).read_text())
    _schedule(pid, os.sched_getscheduler(0), os.sched_getparam(0))


def _schedule(pid: int, policy: int, parameters: os.sched_param) -> None:
    done: set[str] = set()
    with suppress(OSError):
        while new := set(os.listdir(f"/proc/{pid}/task")) - done:  # theirs are like them
            for thread in new:
                with suppress(ProcessLookupError):
                    os.sched_setscheduler(int(thread), policy, parameters)
            done |= new


def may_leave_idle() -> bool:
    """Whether a thread of this user's may leave SCHED_IDLE: one that ends has tried."""
    could: list[bool] = []

    def attempt() -> None:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
            could.append(True)

    thread = threading.Thread(target=attempt, name="sparkdl-priority")
    thread.start()
    thread.join()
    return bool(could)


def _oom_score(pid: int) -> Path:
    return Path(f"/proc/{pid}/oom_score_adj")
