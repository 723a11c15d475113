"""What a node asks of Spark, and which slots there are."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.core.errors import ConfigError
from sparkdl.core.options import Feeding, Placement
from sparkdl.core.settings import Settings
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.driver.slots.placement import choose_placing
from sparkdl.driver.slots.preflight import placing_of, read_topology

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


def spec(nodes: int, placement: Placement = "auto", is_fed: bool = True) -> ClusterSpec:
    settings = Settings(feeding=Feeding(fed=is_fed))
    return ClusterSpec("c", plan_nodes(nodes), placement=placement, settings=settings)


@pytest.mark.parametrize("master", ["spark://m:7077", "k8s://m"])
def test_executors_that_come_late_are_waited_for_and_the_log_says_so(
    master: str, caplog: pytest.LogCaptureFixture
) -> None:
    executors = Executors((), (2,), (2,), (2, 2))
    spark = context(master, executors, spark_executor_cores="2")
    topology = read_topology(spark, spec(3), 60.0, silent_s=0.0)
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
    assert topology is not None
    with pytest.raises(ConfigError, match="3 nodes need 3 task slots at once, and Spark has 0"):
        choose_placing(spec(3), topology)


@pytest.mark.parametrize(
    ("placement", "settings", "is_fed", "is_attached"),
    [
        ("auto", {}, True, False),  # the nodes may fill every slot
        ("auto", {}, False, True),
        ("auto", {"spark.dynamicAllocation.enabled": "true"}, True, True),
        ("attached", {}, True, True),
        ("detached", {}, False, False),
    ],
)
def test_over_spark_connect_nodes_to_feed_give_their_slots_back(
    placement: Placement, settings: dict[str, str], is_fed: bool, is_attached: bool
) -> None:
    session: Any = SimpleNamespace(conf=settings)
    assert placing_of(session, spec(2, placement, is_fed), None).is_attached == is_attached
