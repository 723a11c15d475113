"""What a node asks of Spark, what a failed job means, and which settings cost speed."""

from __future__ import annotations

from typing import Any

import pytest

from sparkdl.core.errors import ConfigError, FrameworkMissingError, LaunchError
from sparkdl.driver.slots.placement import Placing
from sparkdl.driver.slots.preflight import costly_settings, explain_job_failure, node_profile
from sparkdl.node.task import Problem


def test_without_cores_of_its_own_a_node_needs_no_profile() -> None:
    assert node_profile(Placing(True, None, "")) is None


# What a failed job means.


def in_spark(text: str) -> Exception:
    """An executor's exception as it comes out of Spark."""
    return RuntimeError(
        "An error occurred while calling o79.collect.\n"
        ": org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 0.0 "
        "failed 4 times: Traceback (most recent call last):\n"
        f'  File "/x/node/task.py", line 52, in __call__\n{text}\n\n'
        "\tat org.apache.spark.api.python.BasePythonRunner.handle(PythonRunner.scala)\n"
        "\tat java.base/java.lang.Thread.run(Thread.java:829) Error: no\n"
    )


@pytest.mark.parametrize(
    ("kind", "cls"),
    [
        ("FrameworkMissingError", FrameworkMissingError),
        ("ConfigError", ConfigError),
        ("LaunchError", LaunchError),
        ("SomethingElse", LaunchError),
    ],
)
def test_a_problem_found_on_an_executor_is_raised_as_what_it_is(kind: str, cls: type) -> None:
    raised = Problem(kind, "executor a: no 'torch' [\"x\"] \\").error()
    error = explain_job_failure(in_spark(f"sparkdl.core.errors.LaunchError: {raised}"))
    assert type(error) is cls
    assert str(error) == "executor a: no 'torch' [\"x\"] \\"


@pytest.mark.parametrize(
    ("text", "cls", "words"),
    [
        ("pyspark.errors.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has "
         "different version: 3.10 than that in driver: 3.11, …", ConfigError,
         ["3.10 than that in driver: 3.11", "PYSPARK_PYTHON"]),
        ("ModuleNotFoundError: No module named 'sparkdl'", ConfigError,
         ["the executors' Python has no sparkdl", "spark.archives"]),
        ("ModuleNotFoundError: No module named 'pyarrow'", ConfigError,
         ["the executors' Python has no pyarrow", "spark.archives"]),
        ('java.io.IOException: Cannot run program "/no/python": error=2, No such file', ConfigError,
         ['starts no Python: Cannot run program "/no/python": error=2', "PYSPARK_PYTHON"]),
        ("java.lang.OutOfMemoryException: Java heap", LaunchError,
         ["SparkException: Job aborted due to stage failure"]),
        ("ModuleNotFoundError: No module named 'sparkdl_extra'", LaunchError,
         ["carries the nodes failed: ModuleNotFoundError: No module named 'sparkdl_extra'"]),
        ("ValueError: what", LaunchError, ["carries the nodes failed: ValueError: what"]),
    ],
    ids=["Python", "no sparkdl", "no pyarrow", "no Python", "JVM", "another module", "anything"],
)  # fmt: skip
def test_what_spark_says_is_turned_into_what_to_do(text: str, cls: type, words: list[str]) -> None:
    error = explain_job_failure(in_spark(text))
    assert type(error) is cls
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize(
    ("error", "first"),
    [
        (RuntimeError("Job 3 cancelled\nby someone"), "Job 3 cancelled"),
        (RuntimeError(), "RuntimeError"),
        (RuntimeError(" \n"), "RuntimeError"),
    ],
)
def test_an_error_without_a_python_traceback_is_told_by_its_first_line(
    error: Exception, first: str
) -> None:
    assert str(explain_job_failure(error)) == (
        f"the Spark job that carries the nodes failed: {first}"
    )


def test_profiles_are_asked_of_spark_only_when_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Builder:
        def require(self, requests: Any) -> Builder:
            asked.append({name: request.amount for name, request in requests.requests.items()})
            return self

        build = "a profile"

    monkeypatch.setattr("sparkdl.driver.slots.preflight.ResourceProfileBuilder", Builder)
    profile: Any = node_profile(Placing(True, 3, ""))
    assert (profile, asked) == ("a profile", [{"cpus": 3.0}])
    node_profile(Placing(True, 3, "", 2))
    assert asked[1:] == [{"cpus": 3.0, "gpu": 2.0}]


UNIX = "spark.python.unix.domain.socket.enabled"
ARROW = "spark.sql.execution.arrow"
FINE = {UNIX: "true"}


@pytest.mark.parametrize(
    ("conf", "version"),
    [
        (FINE, "4.3.0"),
        ({}, "4.0.2"),  # which has no Unix sockets
        ({**FINE, f"{ARROW}.maxRecordsPerBatch": "0"}, "4.1.0"),
        ({**FINE, f"{ARROW}.maxBytesPerBatch": "1g"}, "4.1.0"),
        ({**FINE, f"{ARROW}.maxBytesPerBatch": "-1", f"{ARROW}.useLargeVarTypes": "true"}, "4.3.0"),
        ({**FINE, "spark.speculation": "false", "spark.python.worker.reuse": "true"}, "4.3.0"),
    ],
)
def test_settings_that_cost_nothing_are_not_mentioned(conf: dict[str, str], version: str) -> None:
    assert costly_settings(conf, version) == []


@pytest.mark.parametrize(
    ("conf", "setting"),
    [
        ({UNIX: "false"}, f"{UNIX}=true"),
        ({}, f"{UNIX}=true"),
        ({**FINE, f"{ARROW}.maxRecordsPerBatch": "100"}, f"{ARROW}.maxRecordsPerBatch=10000"),
        ({**FINE, f"{ARROW}.maxBytesPerBatch": "-1"}, f"{ARROW}.maxBytesPerBatch=64m"),
        ({**FINE, f"{ARROW}.maxBytesPerBatch": "4 GB"}, f"{ARROW}.maxBytesPerBatch=64m"),
        ({**FINE, "spark.speculation": "true"}, "spark.speculation=false"),
        ({**FINE, "spark.dynamicAllocation.enabled": "true"},
         "spark.dynamicAllocation.minExecutors to those you need"),
        ({**FINE, "spark.python.worker.reuse": "false"}, "spark.python.worker.reuse=true"),
    ],
)  # fmt: skip
def test_setting_that_costs_speed_is_named(conf: dict[str, str], setting: str) -> None:
    assert [advice.setting for advice in costly_settings(conf, "4.3.0")] == [setting]
