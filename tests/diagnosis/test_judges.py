"""What facts mean: made-up drivers and executors, and the checks that follow."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from sparkdl.core.errors import ConfigError
from sparkdl.diagnosis import judges
from sparkdl.diagnosis.judges import Check, Report
from sparkdl.diagnosis.look import Facts, Imported, Machine

GIB = 1 << 30
VERSIONS = {"Python": "3.11.7", "sparkdl": "0.1.0", "pyspark": "4.0.1", "numpy": "2.1.0"}
MACHINE = Machine(8 * GIB)
DRIVER = Facts("driver", "head", versions=VERSIONS)
A = Facts("a 1", "a", address="10.0.0.1", versions=VERSIONS, machine=MACHINE)
B = replace(A, executor="b 1", host="b", address="10.0.0.2")


def found(checks: Iterable[Check], verdict: str) -> list[str]:
    """Return the findings of a verdict, and their advice."""
    return [f"{c.name}: {c.finding}. {c.advice}" for c in checks if c.verdict == verdict]


def with_version(facts: Facts, name: str, version: str) -> Facts:
    versions = {**facts.versions, name: version}
    return replace(facts, versions={k: v for k, v in versions.items() if v})


def test_another_package_that_hides_sparkdl_is_a_problem() -> None:
    ours = replace(A, package="/env/sparkdl")
    assert not list(judges.judge_packages([DRIVER, ours, with_version(B, "sparkdl", "")]))
    hiding = replace(with_version(B, "sparkdl", ""), package="/old/sparkdl")
    (problem,) = found(judges.judge_packages([ours, hiding]), "problem")
    assert "b (10.0.0.2): import sparkdl finds another package, at /old/sparkdl" in problem


@pytest.mark.parametrize(
    ("name", "version", "verdict"),
    [
        ("Python", "3.12.1", "problem"),
        ("Python", "3.11.2", "warning"),
        ("sparkdl", "0.0.9", "problem"),
        ("sparkdl", "", "problem"),
        ("numpy", "1.26.4", "problem"),
        ("numpy", "2.2.0", "warning"),
    ],
)
def test_version_of_one_executor_is_named(name: str, version: str, verdict: str) -> None:
    checks = list(judges.judge_versions(DRIVER, [A, with_version(B, name, version)]))
    (said,) = found(checks, verdict)
    assert f"version of {name}: {VERSIONS[name]} on the driver" in said
    assert f"{version or 'none'} on b (10.0.0.2)" in said


def test_frameworks_are_compared_among_executors_alone() -> None:
    with_torch = [with_version(A, "torch", "2.5.0"), with_version(B, "torch", "2.5.0")]
    assert {c.verdict for c in judges.judge_versions(DRIVER, with_torch)} == {"ok"}
    newer = [with_version(A, "pyspark", "4.9.0"), with_version(B, "pyspark", "4.9.0")]
    assert {c.verdict for c in judges.judge_versions(DRIVER, newer, is_client=True)} == {"ok"}
    assert {c.verdict for c in judges.judge_versions(DRIVER, newer)} == {"ok", "problem"}
    differing = [with_torch[0], with_version(B, "torch", "2.6.0")]
    (said,) = found(judges.judge_versions(DRIVER, differing), "problem")
    assert "2.5.0 on a (10.0.0.1); 2.6.0 on b (10.0.0.2)" in said


def test_spark_of_another_release_than_pyspark_is_a_problem() -> None:
    assert judges.judge_spark(DRIVER, "4.0.2", "yarn").verdict == "ok"
    assert judges.judge_spark(DRIVER, "4.1.0", "").verdict == "ok", "behind Spark Connect"
    check = judges.judge_spark(DRIVER, "4.1.0", "yarn")
    assert check.verdict == "problem"
    assert "Install pyspark 4.1.0" in check.advice


def test_executors_that_do_not_reach_the_driver_are_told_in_the_words_of_a_launch() -> None:
    cut = [replace(each, unreachable="timed out") for each in (A, B)]
    (said,) = found(judges.judge_way(cut, "head:5000"), "problem")
    assert "cannot reach the driver at head:5000: timed out" in said
    assert "SPARKDL_DRIVER_HOST" in said
    assert "a (10.0.0.1), b (10.0.0.2)" in said


def test_slowest_node_decides_about_the_exchange() -> None:
    assert "160 MB/s" in found([judges.judge_exchange(16_000_000, [0.1, 0.05])], "ok")[0]
    (said,) = found([judges.judge_exchange(16_000_000, [0.1, 1.0])], "warning")
    assert "16 MB/s" in said
    assert judges.judge_exchange(1, [0.1]).verdict == "skipped"
    assert judges.judge_exchange(1, ["no torch", 0.1]).finding == "no torch"


def test_missing_framework_is_a_problem_where_it_was_asked_for() -> None:
    text = "framework='torch' is not installed on executor a: no module torch. Install it there"
    missing = replace(A, imports={"torch": Imported(text)})
    there = replace(B, imports={"torch": Imported(seconds=2.0)})
    checks = list(judges.judge_imports([missing, there], ["torch"]))
    assert "framework='torch' is not installed on executor a" in found(checks, "problem")[0]
    assert "on 1 of 2 executors, in 2.0 s" in found(checks, "ok")[0]


def test_small_shared_memory_is_named_where_torch_may_use_it() -> None:
    poor = replace(B, machine=Machine(64 << 20))
    assert not list(judges.judge_machines([A, poor], needs_shm=False))
    assert found(judges.judge_machines([A], needs_shm=True), "ok")
    (said,) = found(judges.judge_machines([A, poor], needs_shm=True), "warning")
    assert "b (10.0.0.2): /dev/shm has 0.06 GiB: feeds do not use it" in said


def test_machine_where_no_node_can_start_is_named() -> None:
    bad = replace(B, machine=None, machine_error="No module named 'msgspec'")
    (said,) = found(judges.judge_machines([A, bad], needs_shm=True), "problem")
    assert "b (10.0.0.2): no node can start: No module named 'msgspec'" in said


def test_gpus_that_are_asked_for_and_not_there_are_a_problem() -> None:
    assert not found(judges.judge_gpus([A], None), "problem")
    (said,) = found(judges.judge_gpus([A], 1), "problem")
    assert "a (10.0.0.1): no NVIDIA driver, and num_gpus=1" in said


def test_gpus_that_a_framework_does_not_see_are_a_problem() -> None:
    machine = replace(MACHINE, driver_version="550.1", gpus=("H200", "H200"))
    blind = replace(A, machine=machine, imports={"torch": Imported(gpus=())})
    checks = list(judges.judge_gpus([blind], None))
    assert "2 H200, driver 550.1" in found(checks, "ok")[0]
    assert "torch sees 0 of 2 GPUs" in found(checks, "problem")[0]


def test_path_that_one_executor_lacks_is_named() -> None:
    good, bad = (replace(each, storage={"file:///data": e}) for each, e in ((A, ""), (B, "gone")))
    checks = list(judges.judge_storage([good, bad], ["file:///data"]))
    assert found(checks, "problem")[0].startswith("path /data: b (10.0.0.2): gone. Mount it")
    assert "found from 1 of 2 executors" in found(checks, "ok")[0]
    unasked = judges.judge_storage([good, bad], ["file:///data"], "file:///data")
    assert "b (10.0.0.2): gone" in found(unasked, "warning")[0]


def test_report_is_text_html_and_json() -> None:
    good = Check("clocks", "ok", "they agree")
    bad = Check("slots", "problem", "4 nodes <need> 4", "ask for " + "fewer " * 30)
    report = Report((good, bad), 1.25)
    lines = str(report).splitlines()
    assert lines[0] == "ok       clocks  they agree"
    assert lines[1] == "problem  slots   4 nodes <need> 4"
    assert lines[2].startswith(" " * 17 + "-> ask for fewer")
    assert lines[3].startswith(" " * 20 + "fewer")
    assert lines[-1] == "1 ok, 1 problem, in 1.2 s"
    assert max(map(len, lines)) <= 100
    assert "4 nodes &lt;need&gt; 4" in report._repr_html_()
    made = json.loads(report.to_json())
    assert (made["ok"], made["checks"][1]["advice"]) == (False, bad.advice)
    assert Report((good, Check("a", "warning", ""), Check("b", "skipped", ""))).ok


def test_error_of_a_launch_is_parted_into_finding_and_advice() -> None:
    check = Check.of_error("slots", ConfigError("4 nodes, 2 slots. Ask for fewer. Or wait"))
    assert (check.finding, check.advice) == ("4 nodes, 2 slots", "Ask for fewer. Or wait")
