"""The whole, without Spark: what hangs is ended, what fails hides nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import sparkdl
from sparkdl.cli import main
from sparkdl.core.errors import ConfigError
from sparkdl.diagnosis import judges
from sparkdl.diagnosis.look import look_around

HANGING, BROKEN = (f"tests.diagnosis.hanging:{name}" for name in ("Hanging", "Broken"))


def test_import_that_hangs_is_ended() -> None:
    found = look_around([["framework", HANGING, "wanted"]], limit_s=2.0)
    assert found["imports"] == {HANGING: {"error": "it took longer than 2 s"}}


def test_import_that_fails_is_told_beside_what_is_well(tmp_path: Path) -> None:
    (tmp_path / "here").touch()
    looks = [
        ["machine"],
        ["framework", BROKEN, "wanted"],
        ["storage", f"file://{tmp_path}/here"],
        ["storage", f"file://{tmp_path}/gone"],
    ]
    found = look_around(looks, limit_s=60.0)
    assert found["machine"]["gpu_error"] == ""
    assert "libcublas.so.12" in found["imports"][BROKEN]["error"]
    assert found["storage"][f"file://{tmp_path}/here"] == ""
    assert "no such file" in found["storage"][f"file://{tmp_path}/gone"]


def test_check_that_fails_itself_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(judges, "judge_gpus", broken)
    report = sparkdl.doctor(framework="plain")
    (gpus,) = [check for check in report.checks if check.name == "GPUs"]
    assert gpus.verdict == "warning"
    assert "could not be checked: ZeroDivisionError: a mistake" in gpus.finding
    assert {"versions", "Spark"} <= {check.name for check in report.checks}
    assert report.ok


def test_command_prints_json_alone_and_says_by_its_status_what_it_found(tmp_path: Path) -> None:
    path = str(tmp_path / "gone")
    words = ["doctor", "--framework", "plain", "--path", path, "--json"]
    command = [sys.executable, "-m", "sparkdl", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert [c["name"] for c in found["checks"] if c["verdict"] == "problem"] == [f"path {path}"]


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_session_that_does_not_start_is_told_in_its_time() -> None:
    master = "no-such-master"
    words = ["doctor", "--framework", "plain", "--master", master, "--json"]
    command = [sys.executable, "-m", "sparkdl", *words]
    began_s = time.monotonic()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    took_s = time.monotonic() - began_s
    assert done.returncode == 1
    found = json.loads(done.stdout)
    (problem,) = [check for check in found["checks"] if check["verdict"] == "problem"]
    assert problem["finding"].startswith(f"no session at {master}: ")
    assert found["seconds"] > 0.4 * took_s, "the wait for the session counts"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "0"], "a cluster needs at least one node"),
        (["--framework", "mxnet"], "framework='mxnet' is not known"),
        (["--conf", "a=b"], "add --master or --remote"),
        (["--master", "local", "--conf", "a"], "give KEY=VALUE"),
    ],
)
def test_mistakes_of_the_command_line_have_a_status_of_their_own(
    words: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *words]) == 2
    assert said in capfd.readouterr().err


def test_arguments_are_checked_before_anything_begins() -> None:
    with pytest.raises(ConfigError, match="limit_s=0"):
        sparkdl.doctor(limit_s=0)
