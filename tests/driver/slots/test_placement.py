"""Where nodes go is known before the start, or refused with the setting to change."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.core.errors import ConfigError, ReservationTimeoutError, SparkConfigError
from sparkdl.core.options import Feeding, Placement, Roles
from sparkdl.core.settings import Settings
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.driver.slots import placement
from sparkdl.driver.slots.placement import SlotPlan, Topology, choose_placement, placement_of

YARN = "yarn"
DYNAMIC_ON = "spark.dynamicAllocation.enabled"


def spec(
    nodes: int, placement: Placement = "auto", is_fed: bool = True, num_ps: int = 0, **options: Any
) -> ClusterSpec:
    planned = plan_nodes(nodes, Roles(ps=num_ps))
    settings = Settings(feeding=Feeding(fed=is_fed))
    return ClusterSpec("c", planned, placement=placement, settings=settings, **options)


@pytest.mark.parametrize(
    ("cores", "task_cpus", "executor_gpus", "task_gpus", "slots"),
    [((), 1, 0, 0, 0), ((4,), 1, 0, 0, 4), ((4, 4), 2, 0, 0, 4), ((3, 3), 2, 0, 0, 2),
     ((5, 1), 2, 0, 0, 2), ((1, 1), 2, 0, 0, 0), ((4, 4), 1, 1, 0.0, 8), ((4, 4), 1, 1, 1.0, 2),
     ((4, 4), 1, 4, 2.0, 4), ((4, 4), 1, 8, 1.0, 8), ((4, 4), 1, 1, 0.5, 4),
     ((4, 4), 1, 1, 0.3, 6), ((4, 4), 1, 1, 0.6, 2), ((4, 4), 1, 2, 4.0, 0)],
)  # fmt: skip
def test_slots_are_counted_per_executor_as_many_as_cores_and_gpus_allow(
    cores: tuple[int, ...], task_cpus: int, executor_gpus: int, task_gpus: float, slots: int
) -> None:
    assert Topology(YARN, cores, task_cpus, False, executor_gpus, task_gpus).slots == slots


@pytest.mark.parametrize(
    ("master", "settings", "cores", "may_come"),
    [
        ("local[3]", {}, (3,), False),
        ("local[3]", {DYNAMIC_ON: "true"}, (3,), False),  # which ignores it
        ("local-cluster[2,2,512]", {}, (2,), True),
        ("local-cluster[3, 1, 512]", {}, (1, 1, 1), False),
        # YARN and Kubernetes: so many executors, no more, and they come when there is room.
        ("yarn", {}, (2,), True),
        ("yarn", {}, (1, 2), False),
        ("k8s://https://m", {"spark.executor.instances": "4"}, (1, 1), True),
        # A standalone master starts executors on workers that come later.
        ("spark://m:7077", {}, (), True),
        # Who knows what another master does.
        ("nomad://m", {}, (1,), True),
    ],
)
def test_four_nodes_that_do_not_fit_wait_while_executors_may_come(
    master: str, settings: dict[str, str], cores: tuple[int, ...], may_come: bool
) -> None:
    topology = Topology.of(master, cores, settings.get)
    assert placement.may_come(spec(4), topology) == may_come
    error = ReservationTimeoutError if may_come else ConfigError
    with pytest.raises(error, match="4 nodes need 4 task slots at once, and Spark has") as refused:
        choose_placement(spec(4), topology)
    assert "nodes=, num_executors=" in str(refused.value)


@pytest.mark.parametrize(
    ("master", "settings", "cores"),
    [("k8s://https://m", {"spark.executor.instances": "4"}, (1, 1, 1, 1)),
     ("yarn", {DYNAMIC_ON: "true"}, ())],  # which asks for executors when tasks wait
)  # fmt: skip
def test_four_nodes_that_fit_wait_for_nothing(
    master: str, settings: dict[str, str], cores: tuple[int, ...]
) -> None:
    topology = Topology.of(master, cores, settings.get)
    assert not placement.may_come(spec(4), topology)
    choose_placement(spec(4), topology)


DYNAMIC = Topology(YARN, (2, 2), is_dynamic=True)


@pytest.mark.parametrize(
    ("wanted", "topology", "plan"),
    [
        # Rows to feed: nodes give their slots back.
        (spec(2), Topology(YARN, (2, 1)),
         SlotPlan(False, "3 slots, 2 nodes: Spark tasks feed the nodes")),
        (spec(3), Topology(YARN, (2, 1)),
         SlotPlan(False, "3 slots, 3 nodes: Spark tasks feed the nodes")),
        (spec(2, "attached"), Topology(YARN, (2, 1)),
         SlotPlan(True, "3 slots, 2 nodes: Spark tasks feed the nodes")),
        # Nothing to feed: nodes keep theirs.
        (spec(3, is_fed=False), Topology(YARN, (2, 1)),
         SlotPlan(True, "3 slots, 3 nodes: no Spark task feeds the nodes")),
        (spec(3, "attached", is_fed=False), Topology(YARN, (2, 1)),
         SlotPlan(True, "3 slots, 3 nodes: no Spark task feeds the nodes")),
        (spec(1, "detached", is_fed=False), Topology(YARN, (4,)),
         SlotPlan(False, "4 slots, 1 node: no Spark task feeds the nodes")),
        # Dynamic allocation would take idle executors away, and adds slots when tasks wait.
        (spec(9), DYNAMIC, SlotPlan(True, "4 slots, 9 nodes: Spark tasks feed the nodes")),
    ],
)  # fmt: skip
def test_fed_nodes_are_detached_and_others_keep_their_slots(
    wanted: ClusterSpec, topology: Topology, plan: SlotPlan
) -> None:
    assert choose_placement(wanted, topology) == plan


def test_attached_nodes_in_every_slot_could_not_be_fed() -> None:
    with pytest.raises(ConfigError, match=r"and one more for feeding.*or for placement='detached'"):
        choose_placement(spec(3, "attached"), Topology(YARN, (2, 1), most=2))


def test_detached_nodes_would_lose_their_executors_to_dynamic_allocation() -> None:
    with pytest.raises(ConfigError, match=r"set spark\.dynamicAllocation\.enabled=false"):
        choose_placement(spec(2, "detached"), DYNAMIC)


def with_gpus(
    executor_gpus: int, task_gpus: float = 0.0, master: str = YARN, cores: tuple[int, ...] = (4, 4)
) -> Topology:
    return Topology(master, cores, 1, False, executor_gpus, task_gpus, len(cores))


CLUSTER = "local-cluster[2,4,1024]"


@pytest.mark.parametrize(
    ("wanted", "topology", "gpus"),
    [
        # Tasks have no GPUs, executors do: nodes ask for their own, and feeders need none.
        (spec(2), with_gpus(1), 1),
        (spec(2, num_gpus=4), with_gpus(8), 4),
        (spec(2, "attached"), with_gpus(1), 1),
        (spec(2, num_gpus=0), with_gpus(1), None),
        # Every task has GPUs, feeders too.
        (spec(2), with_gpus(1, 1.0), None),
        (spec(2, num_gpus=0), with_gpus(1, 1.0), 0),
        (spec(2, num_gpus=2), with_gpus(2, 1.0), 2),
        (spec(2), with_gpus(1, 0.25), None),
        (spec(2, num_gpus=1), with_gpus(1, 0.25), 1),
        # As many nodes as GPUs do not fit: they get none from Spark, unless they ask.
        (spec(4), with_gpus(1), None),
        # Masters that refuse profiles: as the session's tasks.
        (spec(2), with_gpus(1, 1.0, CLUSTER), None),
        (spec(2, num_gpus=1), with_gpus(2, 1.0, CLUSTER), None),
        (spec(2), with_gpus(1, 0.0, CLUSTER), None),
        # Parameter servers on the driver's machine take no slot.
        (spec(3, num_ps=1, driver_nodes=1), with_gpus(1), 1),
    ],
)
def test_node_asks_for_its_gpu(wanted: ClusterSpec, topology: Topology, gpus: float | None) -> None:
    assert choose_placement(wanted, topology).node_gpus == gpus


@pytest.mark.parametrize(
    ("wanted", "topology", "words"),
    [
        (spec(2, num_gpus=2), with_gpus(1), r"num_gpus=2, .* an executor 1 GPUs\. Raise spark\.ex"),
        (spec(2, num_gpus=2), with_gpus(2, 1.0, CLUSTER), "num_gpus=2, .* a task 1 GPUs. Raise"),
        (spec(4, num_gpus=1), with_gpus(1), "no room for 4 nodes with num_gpus=1, only for 2"),
        (spec(4), with_gpus(1, 1.0), "need 4 task slots .* has 2 task .*1 GPU each, spark.task.r"),
        (spec(2, "attached"), with_gpus(1, 1.0), "and one more for feeding tasks"),
        (spec(2, num_gpus={"worker": 3}), with_gpus(2), "num_gpus={'worker': 3}, .*executor 2"),
    ],
)
def test_gpus_that_spark_does_not_give_are_refused_with_the_setting_to_change(
    wanted: ClusterSpec, topology: Topology, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        choose_placement(wanted, topology)
    assert isinstance(refused.value, SparkConfigError) == ("num_gpus" in words)


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
    java, facts = SimpleNamespace(sc=lambda: store), {"applicationId": "app-late", "startTime": 0}
    facts |= {"getLocalProperty": None, "getConf": lambda: conf}
    return SimpleNamespace(master=master, _jsc=java, **facts)


def test_executors_that_come_late_are_awaited_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    executors = Executors((), (2,), (2,), (2, 2))
    spark = context("spark://m:7077", executors)
    topology = placement.read_topology(spark, spec(3), 60.0, silent_s=0.0)
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
    assert placement_of(session, spec(2, placement, is_fed), None).is_attached == is_attached
