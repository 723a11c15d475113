"""The whole, without Spark: what hangs is ended, what fails hides nothing."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

import sparkdl
from sparkdl.cli import main
from sparkdl.core.errors import ConfigError
from sparkdl.diagnosis import doctor, judges
from sparkdl.diagnosis.look import look_around
from tests.doubles.frameworks import BREAKS, HANGS


def test_import_that_hangs_is_ended() -> None:
    found = look_around([["framework", HANGS, "wanted"]], limit_s=1.0)
    assert found["imports"] == {HANGS: {"error": "it took longer than 1 s"}}


def test_import_that_fails_is_told_beside_what_is_well(tmp_path: Path) -> None:
    looks = [["machine"], ["framework", BREAKS, "wanted"], ["storage", f"file://{tmp_path}/gone"]]
    found = look_around(looks, limit_s=60.0)
    assert found["machine"]["gpu_error"] == ""
    assert "libcublas.so.12" in found["imports"][BREAKS]["error"]
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


def test_command_prints_json_alone_and_says_by_its_status_what_it_found(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "gone")
    assert main(["doctor", "--framework", "plain", "--path", path, "--json"]) == 1
    found = json.loads(capfd.readouterr().out)
    assert [c["name"] for c in found["checks"] if c["verdict"] == "problem"] == [f"path {path}"]


@pytest.mark.parametrize(
    ("hangs", "why"), [(False, "Could not parse"), (True, "no answer within 0.3 s")]
)
def test_session_that_does_not_start_is_told_in_its_time(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], hangs: bool, why: str
) -> None:
    over = threading.Event()

    def start(options: object) -> None:
        over.wait(60.0 if hangs else 0.3)
        raise RuntimeError("Could not parse Master URL")

    monkeypatch.setattr(doctor, "_start", start)
    monkeypatch.setattr(doctor, "_SESSION_S", 0.3 if hangs else 60.0)
    assert main(["doctor", "--framework", "plain", "--master", "no-such-master", "--json"]) == 1
    over.set()
    found = json.loads(capfd.readouterr().out)
    (problem,) = [check for check in found["checks"] if check["verdict"] == "problem"]
    assert problem["finding"].startswith(f"no session at no-such-master: {why}")
    assert found["seconds"] >= 0.3, "the wait for the session counts"


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
