"""On a cluster: all executors are asked, and nothing is left behind."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

import sparkdl
from sparkdl.diagnosis import executors, measure, probe
from sparkdl.diagnosis.report import Report


def findings(report: Report) -> dict[str, str]:
    return {check.name: f"{check.verdict}: {check.finding}" for check in report.checks}


def test_all_executors_are_looked_at(spark_cluster: SparkSession) -> None:
    report = sparkdl.doctor(spark_cluster, 3, framework="plain", quick=True, paths=["/etc"])
    found = findings(report)
    assert report.ok, report
    assert found["executors"] == "ok: 2 executors on 1 host answered, 4 task slots"
    assert found["slots"].startswith("ok: 4 slots, 3 nodes")
    assert found["ways between executors"] == "ok: 2 of 2 connections succeeded"
    assert "driver and 2 executors: Python 3." in found["versions"]
    assert found["path /etc"] == "ok: found from all 2 executors"


def test_problems_do_not_hide_each_other(
    spark_cluster: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More nodes than slots, and a driver whose name means nothing: executors tell all the same."""
    monkeypatch.setenv("SPARKDL_DRIVER_HOST", "no-such-host.invalid")
    report = sparkdl.doctor(spark_cluster, 9, framework="plain")
    found = findings(report)
    assert found["slots"].startswith("problem: 9 nodes need 9 task slots at once")
    assert found["driver address"].startswith("problem: the coordinator cannot listen on no-such")
    assert found["executors"] == "ok: 2 executors on 1 host answered, 4 task slots"
    assert found["memory"].startswith("ok: at least ")
    assert "free on each executor" in found["memory"]
    assert found["feed and all-reduce"].startswith("skipped: a launch would fail")


def test_job_that_never_ends_is_cancelled(
    spark_cluster: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task stands still where nobody has set a limit."""
    monkeypatch.setattr(probe, "answer", _never)
    monkeypatch.setattr(executors, "_GRACE_S", 1.0)
    report = sparkdl.doctor(spark_cluster, 1, framework="plain", quick=True, wait_s=1, limit_s=1)
    found = findings(report)
    assert found["executors"].startswith("problem: 0 of 4 task slots have answered")
    assert "settings" in found


def _never(order: object, batches: object) -> object:
    import threading

    threading.Event().wait()
    return batches


@pytest.mark.deep
def test_rates_are_measured_by_a_real_launch(
    spark_cluster: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "FEED_S", 1.0)
    found = findings(sparkdl.doctor(spark_cluster, 2, framework="plain", tls=True))
    assert found["TLS"] == "ok: on, as asked for"
    assert found["launch"].startswith("ok: 2 plain nodes began")
    assert "rows/s" in found["feed rate"]
    assert "16 MiB in" in found["all-reduce rate"]
