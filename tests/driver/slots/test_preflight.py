"""What a node asks of Spark, what a failed job means, and which settings cost speed."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.core.errors import (
    ConfigError,
    FrameworkMissingError,
    LaunchError,
    ReservationTimeoutError,
)
from sparkdl.core.spec import ClusterSpec, InputMode, plan_nodes
from sparkdl.driver.slots import preflight
from sparkdl.driver.slots.placement import Placing, choose_placing
from sparkdl.driver.slots.preflight import (
    check_slots_over_connect,
    costly_settings,
    explain_job_failure,
    node_profile,
    read_topology,
)
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


# Executors that are still to come.


class Executors:
    """What Spark's status store says, at each look; the last word stays."""

    def __init__(self, *cores: tuple[int, ...]) -> None:
        self.looks, self._cores = 0, cores

    def executorList(self, _is_active: bool) -> Executors:  # noqa: N802 (Spark calls it so)
        self._now = self._cores[min(self.looks, len(self._cores) - 1)]
        self.looks += 1
        return self

    def size(self) -> int:
        return len(self._now)

    def apply(self, at: int) -> Any:
        return SimpleNamespace(id=lambda: str(at), totalCores=lambda: self._now[at])


def context(master: str, executors: Executors, **settings: str) -> Any:
    """A SparkContext, as far as slots are counted by it."""
    conf = {name.replace("_", "."): value for name, value in settings.items()}
    store = SimpleNamespace(statusStore=lambda: executors)
    return SimpleNamespace(
        master=master,
        applicationId="app-late",
        startTime=0,
        getLocalProperty=None,
        getConf=lambda: conf,
        _jsc=SimpleNamespace(sc=lambda: store),
    )


def spec(nodes: int, mode: InputMode = InputMode.SPARK) -> ClusterSpec:
    return ClusterSpec("c", plan_nodes(nodes), input_mode=mode)


@pytest.mark.parametrize("master", ["spark://m:7077", "k8s://m"])
def test_executors_that_come_late_are_waited_for_and_the_log_says_so(
    master: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_SILENT_S", 0.0)
    monkeypatch.setattr(preflight, "_SLOW_POLL_S", 0.001)
    monkeypatch.setattr(preflight, "EXECUTORS_WAIT_S", 0.0)
    executors = Executors((), (2,), (2,), (2, 2))
    topology = read_topology(context(master, executors, spark_executor_cores="2"), spec(3), 60.0)
    assert topology is not None
    assert topology.slots == 4
    assert executors.looks >= 4
    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    assert line.getMessage() == (
        "Waiting up to 60 s for executors: 3 nodes need 3 task slots at once, and Spark has 0 task "
        "slots (0 executors with [] cores, spark.task.cpus=1)"
    )


def test_wait_for_executors_ends_when_its_time_is_over() -> None:
    executors = Executors((2,))
    topology = read_topology(context("spark://m:7077", executors), spec(3), 0.2)
    assert topology is not None
    assert topology.slots == 2
    with pytest.raises(ReservationTimeoutError, match=r"executors came in time.*start more work"):
        choose_placing(spec(3), topology)


@pytest.mark.parametrize(
    ("master", "settings"),
    [
        ("k8s://m", {"spark_executor_instances": "2"}),
        ("yarn", {"spark_executor_instances": "2"}),
        ("spark://m:7077", {"spark_cores_max": "2"}),
        ("local-cluster[2,1,512]", {}),
    ],
)
def test_nodes_that_can_never_fit_are_refused_before_executors_come(
    master: str, settings: dict[str, str]
) -> None:
    executors = Executors(())
    topology = read_topology(context(master, executors, **settings), spec(3), math.inf)
    assert executors.looks == 1
    with pytest.raises(ConfigError, match="3 nodes need 3 task slots at once, and Spark has 0"):
        choose_placing(spec(3), topology)


class ConnectSession:
    """A Spark Connect session, as far as slots are counted by it."""

    def __init__(self, *slots: int, **settings: str) -> None:
        self.looks, self._slots = 0, slots
        self.conf = {name.replace("_", "."): value for name, value in settings.items()}

    def sql(self, _query: str) -> ConnectSession:
        return self

    def collect(self) -> list[tuple[str]]:
        now = self._slots[min(self.looks, len(self._slots) - 1)]
        self.looks += 1
        return [(f"Range (0, 1, step=1, splits={now})",)]


@pytest.mark.parametrize(
    ("master", "slots", "known"),
    [("local[2]", (2,), 2), ("yarn", (2,), 1), ("spark://m", (2, 2, 4), 4), ("spark://m", (3,), 3)],
)
def test_slots_of_a_connect_server_are_waited_for_and_returned(
    master: str, slots: tuple[int, ...], known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_CONNECT_POLL_S", 0.001)
    session: Any = ConnectSession(*slots, spark_master=master)
    nodes = max(slots) if known > 1 else 2
    assert check_slots_over_connect(session, nodes, 60.0) == known


@pytest.mark.parametrize(
    ("master", "timeout_s", "error", "advice"),
    [
        (
            "local[2]",
            math.inf,
            ConfigError,
            r"or stop the server and start it .* local\[4\]",
        ),
        ("yarn", math.inf, ConfigError, r"raise spark\.executor\.instances"),
        ("spark://m", 0.0, ReservationTimeoutError, "start more workers"),
    ],
)
def test_too_few_slots_of_a_connect_server_are_refused(
    master: str, timeout_s: float, error: type[Exception], advice: str
) -> None:
    session: Any = ConnectSession(2, spark_master=master)
    with pytest.raises(error, match=f"4 nodes need 4 task slots .* server has 2.*{advice}"):
        check_slots_over_connect(session, 4, timeout_s)
    assert session.looks == 1
