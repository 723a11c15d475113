"""A process that stands back, and then is like its agent again; with and without privileges."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sparkdl.node.priority import may_leave_idle, stand_back, step_forward

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="standing back is Linux's")

NOBODY = 65534
THREADS = """\
import sys, threading
for _ in range(3):
    threading.Thread(target=sys.stdin.read).start()
print("up", flush=True)
"""


def oom_score(pid: int | str) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def test_all_threads_of_a_process_are_like_its_agent_again() -> None:
    command = [sys.executable, "-c", THREADS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        stand_back(process.pid)
        assert process.stdout
        process.stdout.read(2)  # its threads have been started by then
        threads = [int(name) for name in os.listdir(f"/proc/{process.pid}/task")]
        assert len(threads) == 4
        policy = os.SCHED_IDLE if may_leave_idle() else os.SCHED_BATCH
        assert {os.sched_getscheduler(thread) for thread in threads} == {policy}
        assert oom_score(process.pid) == 1000
        step_forward(process.pid)
        assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_OTHER}
        assert oom_score(process.pid) == oom_score("self")
        process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
def test_user_without_privileges_can_stand_back_and_step_forward_as_well() -> None:
    story = f"""\
        import os, resource, subprocess
        from sparkdl.node.priority import stand_back, step_forward
        resource.setrlimit(resource.RLIMIT_NICE, (0, 0))
        os.setgroups([])
        os.setgid({NOBODY})
        os.setuid({NOBODY})
        sleeper = subprocess.Popen(["sleep", "60"])
        def look():
            with open(f"/proc/{{sleeper.pid}}/oom_score_adj") as file:
                print(os.sched_getscheduler(sleeper.pid), file.read().strip())
        look()
        stand_back(sleeper.pid)
        look()
        step_forward(sleeper.pid)
        look()
        sleeper.kill()
        sleeper.wait()
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(story)], capture_output=True, text=True, check=True
    )
    before, back, after = done.stdout.splitlines()
    assert before == f"{os.SCHED_OTHER} {oom_score('self')}"
    assert back == f"{os.SCHED_BATCH} 1000", "it could not leave SCHED_IDLE"
    assert after == before


def test_process_that_has_ended_is_no_error() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    stand_back(process.pid)
    step_forward(process.pid)
