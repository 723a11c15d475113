"""What the contestants of `recovery.py` do alike: kill something, and wait for what follows.

Times are in seconds since the kill. Files in a folder tell what happens inside the nodes: `mark` of
`harness.py`, and the process ids of the user's functions.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import NODES, mark, options, wait_for_marks

STEP_S = 0.02


def options_of_kills(description: str | None) -> argparse.ArgumentParser:
    """Return the parser with the options that every contestant of `recovery.py` has."""
    parser = options(description)
    parser.add_argument("--kills", type=int, default=1, help="kills, each in a cluster of its own")
    parser.add_argument("--after-s", type=float, default=0.0, help="of training before each kill")
    return parser


def arrive(folder: str, generation: int) -> Path:
    """On a node: tell that the user's function has been entered, and by which process."""
    here = Path(folder, str(generation))
    for name in ("entered", "stepped", "pids"):
        (here / name).mkdir(parents=True, exist_ok=True)
    (here / "pids" / str(os.getpid())).touch()
    mark(str(here / "entered"))
    return here


def step(here: Path, number: int) -> None:
    """On a node: take a step; tell of the first."""
    time.sleep(STEP_S)
    if number == 0:
        mark(str(here / "stepped"))


def prepare(folder: str, generations: int = 2) -> None:
    """Make the folders of so many generations."""
    for generation in range(generations):
        for name in ("entered", "stepped", "pids"):
            Path(folder, str(generation), name).mkdir(parents=True)


def victim(folder: str, after_s: float = 0.0) -> int:
    """Return the process id of one of the user's functions, `after_s` after all took a step."""
    wait_for_marks(str(Path(folder, "0", "stepped")), 120)
    time.sleep(after_s)
    return min(int(path.name) for path in Path(folder, "0", "pids").iterdir())


def kill(pid: int) -> float:
    """Kill a process; return when."""
    now = time.time()
    os.kill(pid, signal.SIGKILL)
    return now


def executor_of(pid: int) -> int:
    """Return the process id of the executor's JVM that a process belongs to."""
    import psutil

    return next(p.pid for p in psutil.Process(pid).parents() if p.name() == "java")


def return_s(folder: str, killed_s: float, deadline_s: float) -> dict[str, float | None]:
    """Return when all nodes were back in the user's function, and when all had taken a step."""
    found: dict[str, float | None] = {}
    for key, name in (("back_s", "entered"), ("step_s", "stepped")):
        try:
            marks = wait_for_marks(str(Path(folder, "1", name)), deadline_s)
            found[key] = marks[NODES - 1] - killed_s
        except TimeoutError:
            found[key] = None
    return found


class Said:
    """Runs a call of the driver's in a thread, and knows when it ended and how."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.at_s: float | None = None
        self.text = "nothing"
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self, deadline_s: float) -> None:
        """Wait for its end."""
        self._thread.join(deadline_s)

    def _run(self) -> None:
        self.text = outcome(self._call)
        self.at_s = time.time()


def outcome(call: Callable[[], Any]) -> str:
    """Call, and say how that ended."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001 (whatever a peer raises is what it says)
        first, *_ = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {first}"[:200]
    return "returned as if all were well"
