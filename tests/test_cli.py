"""The command line: versions, errors, and programs in several processes of this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sparkdl.cli import main

PROGRAM = """
import sys

import beside
import torch

import sparkdl.horovod.torch as hvd

if __name__ == "__main__":
    hvd.init()
    total = hvd.allreduce(torch.tensor(float(hvd.rank() + 1)), op=hvd.Sum)
    print(f"{beside.WORD} {sys.argv[1:]} rank {hvd.rank()} of {hvd.size()}: {total:.0f}")
"""
FAILS = """
import sys

if "--raise" in sys.argv:
    1 / 0
sys.exit(3)
"""


@pytest.mark.smoke
@pytest.mark.torch
def test_program_runs_in_many_processes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'found'")
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    words = ["python", str(program), "--lr", "0.1", "-np", "7", "--version"]
    assert main(["run", "-np", "2", "-H", "localhost:2", "--gloo", *words]) == 0
    said = capfd.readouterr().out
    for rank in (0, 1):
        arguments = "['--lr', '0.1', '-np', '7', '--version']"
        assert f"[{rank}]<stdout>:found {arguments} rank {rank} of 2: 3" in said


@pytest.mark.smoke
def test_status_is_the_failed_programs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "fails.py"
    program.write_text(FAILS)
    assert main(["run", sys.executable, str(program)]) == 3
    said = capfd.readouterr().err
    assert "ended with exit code 3" in said
    assert said.count("Traceback") == said.count("[0]<stderr>:Traceback") == 1
    assert main(["run", str(program), "--raise"]) == 1
    both = capfd.readouterr()
    assert "raised ZeroDivisionError" in both.err
    assert "[0]<stderr>:    1 / 0" in both.err


def test_what_cannot_work_is_told_without_a_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-np", "2", "-H", "host.invalid:2", "python", __file__]) == 1
    assert "host.invalid is not a name of this machine" in capfd.readouterr().err
    assert main(["run", "-np", "2", "bash", "train.sh"]) == 1
    assert "does not start a Python program" in capfd.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["run", "--mpi", "python", __file__])
    assert "unrecognized arguments: --mpi" in capfd.readouterr().err
