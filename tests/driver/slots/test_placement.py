"""Where nodes go is known before the start, or refused with the setting to change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sparkdl.core.errors import ConfigError, ReservationTimeoutError, SparkConfigError
from sparkdl.core.options import Feeding, Placement, Roles
from sparkdl.core.settings import Settings
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.driver.slots.placement import (
    Placing,
    Topology,
    choose_placing,
    outlook,
)

YARN = "yarn"
DYNAMIC_ON, DYNAMIC_MOST = (f"spark.dynamicAllocation.{end}" for end in ("enabled", "maxExecutors"))


def spec(
    nodes: int, placement: Placement = "auto", is_fed: bool = True, num_ps: int = 0, **options: Any
) -> ClusterSpec:
    planned = plan_nodes(nodes, Roles(ps=num_ps))
    settings = Settings(feeding=Feeding(fed=is_fed))
    return ClusterSpec("c", planned, placement=placement, settings=settings, **options)


@pytest.mark.parametrize(
    ("cores", "task_cpus", "slots"),
    [((), 1, 0), ((4,), 1, 4), ((4, 4), 2, 4), ((3, 3), 2, 2), ((5, 1), 2, 2), ((1, 1), 2, 0)],
)
def test_slots_are_counted_per_executor(cores: tuple[int, ...], task_cpus: int, slots: int) -> None:
    assert Topology(YARN, cores, task_cpus).slots == slots


@pytest.mark.parametrize("is_fed", [True, False])
@pytest.mark.parametrize("placement", ["auto", "attached", "detached"])
def test_too_few_slots_are_refused_with_the_settings_to_change(
    placement: Placement, is_fed: bool
) -> None:
    with pytest.raises(ConfigError) as refused:
        choose_placing(spec(4, placement, is_fed), Topology(YARN, (2, 1), most=(2, 1)))
    text = str(refused.value)
    assert text.startswith("4 nodes need 4 task slots at once, and Spark has 3 task slots (2 exec")
    for setting in ("nodes=", "num_executors=", "spark.executor.instances", "spark.executor.cores"):
        assert setting in text


@pytest.mark.parametrize(
    ("master", "settings", "cores", "found"),
    [
        ("local[3]", {}, (3,), "never"),
        ("local-cluster[2,2,512]", {}, (), "may fit"),
        ("local-cluster[3, 1, 512]", {}, (), "never"),
        # YARN and Kubernetes: so many executors, no more, and they come when there is room.
        ("yarn", {}, (), "never"),
        ("yarn", {"spark.executor.cores": "2"}, (2,), "may fit"),
        ("k8s://https://m", {"spark.executor.instances": "4"}, (1, 1), "may fit"),
        ("k8s://https://m", {"spark.executor.instances": "4"}, (1, 1, 1, 1), "fits"),
        ("yarn", {"spark.executor.instances": "4", "spark.task.cpus": "2"}, (), "never"),
        # A standalone master starts executors on workers that come later.
        ("spark://m:7077", {}, (), "may fit"),
        ("spark://m:7077", {"spark.cores.max": "3"}, (2,), "never"),
        ("spark://m:7077", {"spark.cores.max": "4"}, (2,), "may fit"),
        ("spark://m:7077", {"spark.cores.max": "4", "spark.executor.cores": "3"}, (3,), "never"),
        ("spark://m:7077", {"spark.cores.max": "4",
                            "spark.executor.resource.gpu.amount": "1"}, (), "may fit"),
        # Dynamic allocation asks for executors when tasks wait, up to its limit.
        ("yarn", {DYNAMIC_ON: "true"}, (), "fits"),
        ("yarn", {DYNAMIC_ON: "true", DYNAMIC_MOST: "3"}, (), "never"),
        ("yarn", {DYNAMIC_ON: "true", DYNAMIC_MOST: "2147483647"}, (), "fits"),
        ("local[3]", {DYNAMIC_ON: "true"}, (3,), "never"),  # which ignores it
        # Who knows what another master does.
        ("nomad://m", {}, (1,), "may fit"),
    ],
)  # fmt: skip
def test_settings_say_whether_four_nodes_may_still_fit(
    master: str, settings: dict[str, str], cores: tuple[int, ...], found: str
) -> None:
    topology = Topology.of(master, cores, settings.get)
    assert outlook(spec(4), topology) == found
    error = {"never": ConfigError, "may fit": ReservationTimeoutError}.get(found)
    if error:
        with pytest.raises(error, match="4 nodes need 4 task slots at once"):
            choose_placing(spec(4), topology)
    else:
        choose_placing(spec(4), topology)


DYNAMIC = Topology(YARN, (2, 2), is_dynamic=True)


@pytest.mark.parametrize(
    ("wanted", "topology", "placing"),
    [
        # Rows to feed: nodes give their slots back.
        (spec(2), Topology(YARN, (2, 1)),
         Placing(False, "3 slots, 2 nodes: Spark's tasks feed them")),
        (spec(3), Topology(YARN, (2, 1)),
         Placing(False, "3 slots, 3 nodes: Spark's tasks feed them")),
        (spec(2, "attached"), Topology(YARN, (2, 1)),
         Placing(True, "3 slots, 2 nodes: Spark's tasks feed them")),
        # Nothing to feed: nodes keep theirs.
        (spec(3, is_fed=False), Topology(YARN, (2, 1)),
         Placing(True, "3 slots, 3 nodes: nothing has to be fed")),
        (spec(3, "attached", is_fed=False), Topology(YARN, (2, 1)),
         Placing(True, "3 slots, 3 nodes: nothing has to be fed")),
        (spec(1, "detached", is_fed=False), Topology(YARN, (4,)),
         Placing(False, "4 slots, 1 node: nothing has to be fed")),
        # Dynamic allocation would take idle executors away, and adds slots when tasks wait.
        (spec(9), DYNAMIC, Placing(True, "4 slots, 9 nodes: Spark's tasks feed them")),
    ],
)  # fmt: skip
def test_fed_nodes_are_detached_and_others_keep_their_slots(
    wanted: ClusterSpec, topology: Topology, placing: Placing
) -> None:
    assert choose_placing(wanted, topology) == placing


def test_attached_nodes_in_every_slot_could_not_be_fed() -> None:
    topology = Topology(YARN, (2, 1))
    assert outlook(spec(3, "attached"), topology) == "may fit"
    with pytest.raises(ConfigError, match=r"and one more for feeding.*or for placement='detached'"):
        choose_placing(spec(3, "attached"), replace(topology, most=(2, 1)))


def test_detached_nodes_would_lose_their_executors_to_dynamic_allocation() -> None:
    with pytest.raises(ConfigError, match=r"set spark\.dynamicAllocation\.enabled=false"):
        choose_placing(spec(2, "detached"), DYNAMIC)


# GPUs


@pytest.mark.parametrize(
    ("executor_gpus", "task_gpus", "slots"),
    [(0, 0.0, 8), (1, 0.0, 8), (1, 1.0, 2), (4, 2.0, 4), (8, 1.0, 8), (1, 0.5, 4), (1, 0.3, 6),
     (2, 4.0, 0)],
)  # fmt: skip
def test_slots_are_as_many_as_gpus_allow(executor_gpus: int, task_gpus: float, slots: int) -> None:
    topology = Topology(YARN, (4, 4), 1, False, executor_gpus, task_gpus)
    assert topology.slots == slots


def with_gpus(
    executor_gpus: int, task_gpus: float = 0.0, master: str = YARN, cores: tuple[int, ...] = (4, 4)
) -> Topology:
    return Topology(master, cores, 1, False, executor_gpus, task_gpus, cores)


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
def test_a_node_asks_spark_for_its_gpus(
    wanted: ClusterSpec, topology: Topology, gpus: float | None
) -> None:
    assert choose_placing(wanted, topology).node_gpus == gpus


@pytest.mark.parametrize(
    ("wanted", "topology", "words"),
    [
        (spec(2, num_gpus=2), with_gpus(1), r"num_gpus=2, .* an executor 1 GPUs\. Raise spark\.ex"),
        (
            spec(2, num_gpus=2),
            with_gpus(2, 1.0, CLUSTER),
            "num_gpus=2, .* a task 1 GPUs. Raise spark",
        ),
        (
            spec(4, num_gpus=1),
            with_gpus(1),
            "no room for 4 nodes with num_gpus=1, only for 2, and ",
        ),
        (spec(4), with_gpus(1, 1.0), "need 4 task slots .* has 2 task .*1 GPU each, spark.task.r"),
        (spec(2, "attached"), with_gpus(1, 1.0), "and one more for feeding tasks"),
        (spec(2, num_gpus={"worker": 3}), with_gpus(2), "num_gpus={'worker': 3}, .*executor 2"),
    ],
)
def test_gpus_that_spark_does_not_give_are_refused_with_the_setting_to_change(
    wanted: ClusterSpec, topology: Topology, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        choose_placing(wanted, topology)
    assert isinstance(refused.value, SparkConfigError) == ("num_gpus" in words)
