"""What the failure of a Spark job means, and what to change."""

from __future__ import annotations

import pytest

from sparkdl.core.errors import ConfigError, FrameworkMissingError, LaunchError, SparkConfigError
from sparkdl.driver.slots.spark_errors import explain_job_failure
from sparkdl.node.task import Problem


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
        ("SparkConfigError", SparkConfigError),
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
         ["the executors' Python has no sparkdl", "with it, here /"]),
        ("ModuleNotFoundError: No module named 'pyarrow'", ConfigError,
         ["the executors' Python has no pyarrow", "spark.archives"]),
        ('java.io.IOException: Cannot run program "/no/python": error=2, No such file', ConfigError,
         ['cannot start Python: Cannot run program "/no/python": error=2', "PYSPARK_PYTHON"]),
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
def test_error_without_python_traceback_is_told_by_first_line(error: Exception, first: str) -> None:
    told = str(explain_job_failure(error))
    assert told == f"the Spark job that carries the nodes failed: {first}"
