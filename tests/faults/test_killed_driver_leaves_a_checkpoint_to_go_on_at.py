"""The driver is killed: its nodes end by themselves, and the same job goes on at the checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import psutil

from sparkdl.core.deadline import Deadline
from tests.doubles.nodes import SOON_S, all_gone
from tests.faults.soak import PROGRAM


def begin(folder: Path) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """Start the driver; return it, and the processes of its nodes."""
    arguments = [str(folder), str(2 * 8 * 20), "2", "1", "0.02"]
    driver = subprocess.Popen(
        [sys.executable, str(PROGRAM), *arguments], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout
    return driver, [psutil.Process(pid) for pid in json.loads(driver.stdout.readline())]


def wait_for_checkpoint(folder: Path) -> None:
    deadline, never = Deadline.after(SOON_S), threading.Event()
    while not list(folder.glob("step-*/manifest.json")):
        assert not deadline.has_passed
        never.wait(0.02)


def test_killed_driver_leaves_a_checkpoint_to_go_on_at(tmp_path: Path) -> None:
    first, them = begin(tmp_path)
    with first:
        wait_for_checkpoint(tmp_path)
        first.kill()
        assert all_gone(them)
    left = sorted(tmp_path.glob("step-*"))
    assert left
    assert all((folder / "manifest.json").exists() for folder in left)
    second, _ = begin(tmp_path)
    with second:
        out, _ = second.communicate(timeout=6 * SOON_S)
    assert json.loads(out.splitlines()[-1]) == {"lost": 0, "doubled": 0, "generation": 0}
