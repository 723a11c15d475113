"""The types of `**options`: they are those of what takes them, and a type checker uses them."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from scripts.generate import OPTIONS, with_fields

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """\
import sparkdl
from sparkdl import search


def train(args: object, ctx: sparkdl.NodeContext) -> int:
    return ctx.rank


sparkdl.run(None, train, None, 2, executor="local", framework="plain", max_restarts=1, timeout_s=9)
sparkdl.run(None, train, None, 2, max_restart=1)
sparkdl.run(None, train, None, 2, feeding=3)
sparkdl.launch(None, train, node=2)
search(None, train, lambda trial: {}, trials=2, executor="yarn")
search(None, train, lambda trial: {}, trials=2, executor="local", num_gpus={"worker": 1})
"""
WRONG = {
    10: 'Unexpected keyword argument "max_restart" for "run"',
    11: 'Argument "feeding" to "run" has incompatible type "int"; expected "Feeding"',
    12: 'Unexpected keyword argument "node" for "launch"',
    13: 'Argument "executor" to "search" has incompatible type',
}


def test_types_of_options_are_those_of_launch() -> None:
    text = OPTIONS.read_text(encoding="utf-8")
    assert text == with_fields(text), "write them: python -m scripts.generate"


@pytest.mark.deep  # mypy reads all that sparkdl imports
@pytest.mark.timeout(300)
def test_type_checker_finds_sparkdl_and_reports_misspelt_and_wrong_options(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    finders = Path(sysconfig.get_path("purelib")).glob("__editable___sparkdl_cluster_*_finder.py")
    environment = dict(os.environ)
    if any(finders):  # an installation that was not made by `make setup`
        environment["MYPYPATH"] = str(ROOT)
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path), program.name]
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    errors = [line for line in run.stdout.splitlines() if ": error: " in line]
    assert [int(line.split(":")[1]) for line in errors] == list(WRONG), run.stdout + run.stderr
    for line, text in zip(errors, WRONG.values(), strict=True):
        assert text in line
