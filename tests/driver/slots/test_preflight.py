"""What a node asks of Spark, and which slots there are."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.core.errors import ConfigError, ReservationTimeoutError
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.driver.slots.placement import choose_placing
from sparkdl.driver.slots.preflight import (
    Pace,
    check_slots_over_connect,
    read_topology,
)

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


def spec(nodes: int) -> ClusterSpec:
    return ClusterSpec("c", plan_nodes(nodes))


@pytest.mark.parametrize("master", ["spark://m:7077", "k8s://m"])
def test_executors_that_come_late_are_waited_for_and_the_log_says_so(
    master: str, caplog: pytest.LogCaptureFixture
) -> None:
    executors = Executors((), (2,), (2,), (2, 2))
    spark = context(master, executors, spark_executor_cores="2")
    topology = read_topology(spark, spec(3), 60.0, Pace(slow_poll_s=0.001, silent_s=0.0))
    assert topology is not None
    assert topology.slots == 4
    assert executors.looks >= 4
    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    assert line.getMessage() == (
        "Waiting up to 60 s for executors: 3 nodes need 3 task slots at once, and Spark has 0 task "
        "slots (0 executors with [] cores, spark.task.cpus=1). Give Spark more executors or cores, "
        "or launch fewer nodes"
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
    master: str, slots: tuple[int, ...], known: int
) -> None:
    session: Any = ConnectSession(*slots, spark_master=master)
    nodes = max(slots) if known > 1 else 2
    assert check_slots_over_connect(session, nodes, 60.0, Pace(poll_s=0.001)) == known


@pytest.mark.parametrize(
    ("master", "timeout_s", "error", "advice"),
    [
        ("local[2]", math.inf, ConfigError, r"or stop the server and start it .* local\[4\]"),
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
