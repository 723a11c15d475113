"""A random schedule of faults, by a seed, on trainings with checkpoints: nothing may be lost.

Runs in: the process of pytest, or alone: `make soak MINUTES=10 SEED=1`

Each job is a driver program of its own (`tests/doubles/drivers/ledger.py`), whose model is the
multiset of the rows that it has seen. Faults come from outside while it runs. A driver that is
killed is started again with the same folder of checkpoints.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from sparkdl.core.deadline import Deadline
from tests.doubles.leaks import RUN_VARIABLE, Police
from tests.doubles.nodes import NodeProcesses, processes

PROGRAM = Path(__file__).parents[1] / "doubles" / "drivers" / "ledger.py"
ROWS, EPOCHS, CALLS = 2 * 8 * 30, 2, 3
STEP_S = 0.02
JOB_S = 300.0
"""How long a job may take, restarts included; a machine may be slow."""
_MAX_FAULTS = 12
"""Of one job, so that it comes to its end."""


@dataclass
class Score:
    injected: Counter[str] = field(default_factory=Counter)
    recovered: int = 0
    jobs: int = 0
    restarts: int = 0
    lost: int = 0
    doubled: int = 0
    leaks: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether every job was right in the end."""
        return not (self.lost or self.doubled or self.leaks or self.problems)

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.injected.items()))
        lines = [
            f"jobs: {self.jobs}, restarts: {self.restarts}",
            f"faults injected: {self.injected.total()} ({kinds})",
            f"faults recovered: {self.recovered}",
            f"rows lost: {self.lost}",
            f"rows doubled: {self.doubled}",
            f"leaks: {len(self.leaks)}",
        ]
        return "\n".join([*lines, *self.leaks, *self.problems])


Strike = Callable[[NodeProcesses, psutil.Process], None]
_never = threading.Event()


def _stop_child(node: NodeProcesses, driver: psutil.Process) -> None:
    """Stop a child that has begun: before, it has not asked the kernel to die with its agent."""
    status = Path(f"/proc/{node.child.pid}/status").read_text()
    (caught,) = re.findall(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)
    if not int(caught, 16) >> (signal.SIGUSR1 - 1) & 1:
        raise psutil.NoSuchProcess(node.child.pid)
    node.child.suspend()


def _kill_driver(node: NodeProcesses, driver: psutil.Process) -> None:
    """Kill the driver; wake its agents, of which one that is stopped cannot see that it is gone."""
    agents = driver.children()
    driver.kill()
    for agent in agents:
        with suppress(psutil.Error):
            agent.resume()


def _pause(process: psutil.Process) -> None:
    process.suspend()
    _never.wait(0.3)
    process.resume()


FAULTS: dict[str, Strike] = {
    "child killed": lambda node, driver: node.child.kill(),
    "child terminated": lambda node, driver: node.child.terminate(),
    "child aborted": lambda node, driver: node.child.send_signal(signal.SIGABRT),
    "child stopped": _stop_child,
    "child paused": lambda node, driver: _pause(node.child),
    "agent killed": lambda node, driver: node.agent.kill(),
    "agent stopped": lambda node, driver: node.agent.suspend(),
    "agent paused": lambda node, driver: _pause(node.agent),
    "driver paused": lambda node, driver: _pause(driver),
    "driver killed": _kill_driver,
}


class Job:
    """One training, from its first driver to its result."""

    def __init__(self, chance: random.Random, score: Score, folder: Path, wait_s: float) -> None:
        self._chance = chance
        self._score = score
        self._folder = folder
        self._wait_s = wait_s
        self._kinds: list[str] = []
        self._injected = 0

    def run(self, end: Deadline) -> None:
        """Train, with faults until `end`; note what came of it."""
        deadline = Deadline.after(JOB_S)
        self._score.jobs += 1
        while not self._train(end, deadline):
            pass

    def _train(self, end: Deadline, deadline: Deadline) -> bool:
        """Start a driver; return false if it has been killed."""
        arguments = [str(self._folder), *map(str, (ROWS, EPOCHS, CALLS, STEP_S))]
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(
                [sys.executable, str(PROGRAM), *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            ) as driver,
        ):
            assert driver.stdout
            driver.stdout.readline()  # once the nodes are there
            is_killed = False
            while driver.poll() is None and not is_killed and not end.has_passed:
                if self._injected >= _MAX_FAULTS:
                    break
                with suppress(subprocess.TimeoutExpired):
                    driver.wait(self._chance.uniform(0.5, 1.5) * self._wait_s)
                    break
                is_killed = self._strike(driver) == "driver killed"
            try:
                out, _ = driver.communicate(timeout=deadline.remaining_s)
            except subprocess.TimeoutExpired:
                driver.kill()
                self._score.problems.append(f"a job was not over within {JOB_S:g} s")
                return True
            if is_killed and driver.returncode == -signal.SIGKILL:
                return False
            errors.seek(0)
            self._note(driver.returncode, out, errors.read())
            return True

    def _strike(self, driver: subprocess.Popen[str]) -> str:
        """Have something go wrong; return what."""
        if not self._kinds:  # all of them come before any comes again
            self._kinds = self._chance.sample(sorted(FAULTS), len(FAULTS))
        kind = self._kinds.pop()
        try:
            nodes = processes(driver.pid)
            if not nodes:
                self._kinds.append(kind)
                return ""
            node = nodes[self._chance.choice(sorted(nodes))]
            FAULTS[kind](node, psutil.Process(driver.pid))
        except (OSError, psutil.Error):  # it ended meanwhile, by an earlier fault
            self._kinds.append(kind)
            return ""
        self._injected += 1
        self._score.injected[kind] += 1
        return kind

    def _note(self, status: int, out: str, errors: str) -> None:
        score = self._score
        if status:
            score.problems.append(f"a job ended with status {status}:\n{errors[-6000:]}")
            return
        result = json.loads(out.splitlines()[-1])
        score.lost += result["lost"]
        score.doubled += result["doubled"]
        score.restarts += result["generation"]
        if not (result["lost"] or result["doubled"]):
            score.recovered += self._injected


def soak(run_s: float, seed: int, wait_s: float = 1.5) -> Score:
    """Have faults happen for so many seconds, and to the end of the job that is under way then.

    Args:
        wait_s: between two faults, about.
    """
    chance, score, end = random.Random(seed), Score(), Deadline.after(run_s)
    while not end.has_passed and score.is_clean:
        police = Police(os.environ[RUN_VARIABLE], deadline_s=15.0)
        folder = Path(tempfile.mkdtemp(prefix="soak-"))
        Job(chance, score, folder, wait_s).run(end)
        score.leaks += police.leaks()
        police.clean_up()
        shutil.rmtree(folder)
    return score


def main() -> int:
    """Soak for MINUTES (1), with the faults of SEED (drawn by chance)."""
    minutes = float(os.environ.get("MINUTES") or 1)
    seed = int(os.environ.get("SEED") or random.SystemRandom().randrange(1 << 16))
    os.environ[RUN_VARIABLE] = f"soak-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="sdl-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        score = soak(minutes * 60, seed)
    print(f"seed: {seed}\n{score}")
    return 0 if score.is_clean else 1


if __name__ == "__main__":
    raise SystemExit(main())
