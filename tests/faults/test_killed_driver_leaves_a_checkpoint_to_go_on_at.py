"""The driver is killed: its nodes end by themselves, and the same job goes on at the checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil

from tests.doubles.nodes import SOON_S, all_gone
from tests.doubles.until import until
from tests.faults.soak import PROGRAM


def begin(folder: Path) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """Start the driver; return it, and the processes of its nodes."""
    arguments = [str(folder), str(2 * 8 * 20), "2", "1", "0.02"]
    driver = subprocess.Popen(
        [sys.executable, str(PROGRAM), *arguments], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout
    return driver, [psutil.Process(pid) for pid in json.loads(driver.stdout.readline())]


def test_killed_driver_leaves_a_checkpoint_to_go_on_at(tmp_path: Path) -> None:
    first, them = begin(tmp_path)
    with first:
        assert until(lambda: [*tmp_path.glob("step-*/manifest.json")])
        first.kill()
        assert all_gone(them)
    left = sorted(tmp_path.glob("step-*"))
    assert left
    assert all((folder / "manifest.json").exists() for folder in left)
    second, _ = begin(tmp_path)
    with second:
        out, _ = second.communicate(timeout=6 * SOON_S)
    assert json.loads(out.splitlines()[-1]) == {"lost": 0, "doubled": 0, "generation": 0}
