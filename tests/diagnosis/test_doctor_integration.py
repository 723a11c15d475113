"""On a cluster: all executors are needs, and nothing is left behind."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

import sparkdl
from sparkdl.diagnosis import probe
from sparkdl.diagnosis.judges import Report


def findings(report: Report) -> dict[str, str]:
    return {check.name: f"{check.verdict}: {check.finding}" for check in report.checks}


@pytest.mark.parametrize(
    "nodes", [pytest.param(1, marks=pytest.mark.smoke), pytest.param(None, marks=pytest.mark.deep)]
)
def test_nodes_of_a_launch_are_looked_at(spark_cluster: SparkSession, nodes: int | None) -> None:
    report = sparkdl.doctor(spark_cluster, nodes, framework="plain", paths=["/etc"], tls=True)
    found = findings(report)
    assert report.ok, report
    assert found["executors"] == "ok: 2 executors on 1 host answered"
    count = "1 node" if nodes else "2 nodes"
    assert found["slots"].startswith(f"ok: 4 slots, {count}")
    assert "is reached from all 2 executors" in found["way to the driver"]
    assert "driver and 2 executors: Python 3." in found["versions"]
    assert found["launch"].startswith(f"ok: {count.replace('node', 'plain node')} started in")
    assert ("there is one node" if nodes else "16 MiB in") in found["all-reduce"]
    assert found["path /etc"].startswith("ok: found from ")


@pytest.mark.smoke
def test_each_problem_is_told(spark_cluster: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """More nodes than slots, and a driver whose name means nothing: executors tell all the same."""
    monkeypatch.setenv("SPARKDL_DRIVER_HOST", "no-such-host.invalid")
    report = sparkdl.doctor(spark_cluster, 9, framework="plain")
    found = findings(report)
    assert found["slots"].startswith("problem: 9 nodes need 9 task slots at once")
    assert found["driver address"].startswith("problem: the coordinator cannot listen on no-such")
    assert found["executors"] == "ok: 2 executors on 1 host answered"
    assert found["launch"].startswith("skipped: a launch would fail")


@pytest.mark.smoke
def test_endless_job_is_ended(spark_cluster: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task stands still where nobody has set a limit."""
    monkeypatch.setattr(probe, "run_probe", _never)
    found = findings(sparkdl.doctor(spark_cluster, 1, framework="plain", limit_s=1))
    assert found["executors"].startswith("problem: a job of 4 tasks did not finish within 1 s")
    assert "launch" in found


def _never(host: str, port: int, batches: object) -> object:
    import threading

    threading.Event().wait()
    return batches
