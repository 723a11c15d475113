"""Every benchmark can be started: a module that moved is noticed before somebody measures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"

_IMPORT_ALL = """
import pathlib, runpy, sys
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.py")):
    runpy.run_path(str(path), run_name=path.stem)
    print(path.name)
"""


@pytest.mark.deep  # no benchmark is part of what users install
def test_every_benchmark_imports_what_it_needs() -> None:
    """Each as `make` runs it: with its own folder and the repository on the path."""
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_ALL, str(FOLDER)],
        env={"PYTHONPATH": f"{FOLDER}:{FOLDER.parent}", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == sorted(path.name for path in FOLDER.glob("*.py"))
