"""Where nodes go is known before the start, or refused with the setting to change; slots that
come and go are reported once that lasts.
"""

from __future__ import annotations

from typing import Any

import pytest

from sparkdl.core.errors import ConfigError, ReservationTimeoutError, SparkConfigError
from sparkdl.core.options import Feeding, Placement, Roles
from sparkdl.core.settings import Settings
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.driver.slots.placement import (
    LASTING_S,
    UNCOUNTED,
    Placing,
    SlotWatch,
    Standing,
    Topology,
    choose_placing,
    outlook,
    stand,
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


def test_a_topology_says_what_its_slots_are_made_of() -> None:
    assert Topology(YARN, (4, 2), 2).describe() == (
        "3 task slots (2 executors with [4, 2] cores, spark.task.cpus=2)"
    )


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


@pytest.mark.parametrize(
    ("master", "advice"),
    [
        ("local[2]", r"start it with the master local\[4\] instead of local\[2\], or .*'local'"),
        ("local-cluster[2,1,512]", r"or of their cores in local-cluster\[2,1,512\]"),
        ("spark://m:7077", "start more workers, raise spark.cores.max"),
        ("yarn", "raise spark.executor.instances or spark.executor.cores"),
        ("nomad://m", "raise the number of executors or of their cores"),
    ],
)
def test_advice_for_more_slots_is_what_the_master_understands(master: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        choose_placing(spec(4), Topology(master, (1, 1), most=(1, 1)))


def test_executors_that_did_not_come_in_time_are_counted() -> None:
    topology = Topology("k8s://m", (1,), most=(1, 1, 1, 1))
    with pytest.raises(
        ReservationTimeoutError,
        match=r"has 1 task slot .*, and room for 4 nodes once all .* raise Startup\(timeout_s=…\)",
    ):
        choose_placing(spec(4), topology)


DYNAMIC = Topology(YARN, (2, 2), is_dynamic=True)


@pytest.mark.parametrize(
    ("wanted", "topology", "placing"),
    [
        # Slots left over: nodes keep theirs.
        (spec(2), Topology(YARN, (2, 1)),
         Placing(True, None, "3 slots, 2 nodes: spare slots feed")),
        (spec(2, "attached"), Topology(YARN, (2, 1)),
         Placing(True, None, "3 slots, 2 nodes: spare slots feed")),
        # None left over, and rows to feed: nodes give theirs back.
        (spec(3), Topology(YARN, (2, 1)),
         Placing(False, None, "3 slots for 3 nodes, which leaves none for feeding")),
        # Nothing to feed: nodes keep theirs.
        (spec(3, is_fed=False), Topology(YARN, (2, 1)),
         Placing(True, None, "3 slots, 3 nodes: nothing has to be fed")),
        (spec(3, "attached", is_fed=False), Topology(YARN, (2, 1)),
         Placing(True, None, "3 slots, 3 nodes: nothing has to be fed")),
        # With dynamic allocation there may be more slots soon.
        (spec(9), DYNAMIC, Placing(True, None, "4 slots, 9 nodes: spare slots feed")),
        (spec(9, "attached"), DYNAMIC, Placing(True, None, "4 slots, 9 nodes: spare slots feed")),
        # What cannot be counted is as the user says.
    ],
)  # fmt: skip
def test_placing(wanted: ClusterSpec, topology: Topology, placing: Placing) -> None:
    assert choose_placing(wanted, topology) == placing


def test_detached_is_detached_even_where_slots_are_left_over() -> None:
    placing = choose_placing(spec(1, "detached"), Topology(YARN, (4,)))
    assert (placing.is_attached, placing.node_cpus) == (False, None)


def test_attached_nodes_in_every_slot_could_not_be_fed() -> None:
    with pytest.raises(ConfigError, match=r"keeps all 3 slots.*use placement='detached'"):
        choose_placing(spec(3, "attached"), Topology(YARN, (2, 1)))


def test_detached_nodes_would_lose_their_executors_to_dynamic_allocation() -> None:
    with pytest.raises(ConfigError, match=r"set spark\.dynamicAllocation\.enabled=false"):
        choose_placing(spec(2, "detached"), DYNAMIC)


@pytest.mark.parametrize(
    ("nodes", "topology", "node_cpus"),
    [
        (2, Topology(YARN, (3, 3)), 2),  # two nodes do not fit into three cores
        (2, Topology(YARN, (4, 4)), 3),
        (2, Topology(YARN, (8, 5)), 3),  # the smallest executor decides
        (2, Topology(YARN, (4, 4, 4)), 3),
        (1, Topology("spark://m:7077", (16,)), 9),
        (2, Topology(YARN, (2, 2)), None),  # nothing would be left for feeders
        (2, Topology(YARN, (8,)), None),  # fewer executors than nodes: some share
        (2, Topology(YARN, (8, 8), task_cpus=2), 5),
        (1, Topology(YARN, (4, 4), task_cpus=2), 3),
        (2, Topology(YARN, (4, 4), task_cpus=2), None),  # one core each is left, feeders take two
        (1, Topology(YARN, (8, 8), task_cpus=5), None),
        (2, Topology("local[8]", (8, 8)), None),  # these masters refuse profiles
        (2, Topology("local-cluster[2,4,1024]", (4, 4)), None),
        (2, Topology(YARN, (8, 8), is_dynamic=True), None),
    ],
)
def test_a_node_takes_so_many_cores_that_no_second_fits_and_a_feeder_does(
    nodes: int, topology: Topology, node_cpus: int | None
) -> None:
    placing = choose_placing(spec(nodes), topology)
    assert (placing.is_attached, placing.node_cpus) == (True, node_cpus)
    if node_cpus is not None:
        assert 2 * node_cpus > min(topology.cores)
        assert node_cpus < min(topology.cores)


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
    ("wanted", "topology", "is_attached", "cpus", "gpus"),
    [
        # Tasks have no GPUs, executors do: nodes ask for their own, and feeders need none.
        (spec(2), with_gpus(1), True, 3, 1),
        (spec(2), with_gpus(1, cores=(2, 2)), True, 1, 1),
        (spec(2, num_gpus=4), with_gpus(8), True, 3, 4),
        (spec(2, "detached"), with_gpus(1), False, 1, 1),
        (spec(2, num_gpus=0), with_gpus(1), True, 3, 0),
        # Every task has GPUs, feeders too.
        (spec(2), with_gpus(1, 1.0), False, None, 0),
        (spec(2, is_fed=False), with_gpus(1, 1.0), True, 3, 1),
        (spec(1), with_gpus(1, 1.0), True, None, 0),
        (spec(2), with_gpus(2, 1.0), True, None, 0),
        (spec(2, num_gpus=2), with_gpus(2, 1.0), False, 1, 2),
        (spec(2, num_gpus=2), with_gpus(4, 1.0, cores=(8, 8)), True, 1, 2),
        (spec(2), with_gpus(1, 0.25), True, 3, 0.25),
        (spec(2, num_gpus=1), with_gpus(1, 0.25), False, 1, 1),
        # As many nodes as GPUs do not fit: they get none from Spark, unless they ask.
        (spec(4), with_gpus(1), True, None, 0),
        # Masters that refuse profiles: as the session's tasks.
        (spec(2), with_gpus(1, 1.0, CLUSTER), False, None, 0),
        (spec(2, num_gpus=1), with_gpus(2, 1.0, CLUSTER), True, None, 0),
        (spec(2), with_gpus(1, 0.0, CLUSTER), True, None, 0),
        # Parameter servers on the driver's machine take no slot.
        (spec(3, num_ps=1, driver_nodes=1), with_gpus(1), True, 3, 1),
    ],
)
def test_a_node_asks_spark_for_its_gpus(
    wanted: ClusterSpec, topology: Topology, is_attached: bool, cpus: int | None, gpus: float
) -> None:
    placing = choose_placing(wanted, topology)
    assert (placing.is_attached, placing.node_cpus, placing.node_gpus) == (is_attached, cpus, gpus)


@pytest.mark.parametrize(
    ("wanted", "topology", "words"),
    [
        (spec(2, num_gpus=2), with_gpus(1), r"num_gpus=2, .* an executor 1 GPUs\. Raise spark\.ex"),
        (
            spec(2, num_gpus=2),
            with_gpus(2, 1.0, CLUSTER),
            "num_gpus=2, .* a task 1 GPUs. Raise spark",
        ),
        (spec(4, num_gpus=1), with_gpus(1), "no room for 4 nodes with num_gpus=1, only for 2: "),
        (spec(4), with_gpus(1, 1.0), "need 4 task slots .* has 2 task .*1 GPU each, spark.task.r"),
        (spec(2, "attached"), with_gpus(1, 1.0), "Or leave out spark.task.resource.gpu.amount"),
        (spec(2, num_gpus={"worker": 3}), with_gpus(2), "num_gpus={'worker': 3}, .*executor 2"),
    ],
)
def test_gpus_that_spark_does_not_give_are_refused_with_the_setting_to_change(
    wanted: ClusterSpec, topology: Topology, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        choose_placing(wanted, topology)
    assert isinstance(refused.value, SparkConfigError) == ("num_gpus" in words)


# Again, while nodes run: executors come and go


def standing(
    wanted: ClusterSpec, before: Topology, now: Topology, others: int = 0
) -> tuple[int, bool]:
    found = stand(wanted, choose_placing(wanted, before), now, others)
    return found.room, found.is_short


@pytest.mark.parametrize(
    ("wanted", "before", "now", "others", "expected"),
    [
        (spec(2), (2, 2), (2, 2), 0, (2, False)),
        (spec(2), (2, 2), (2, 1), 0, (2, False)),  # one slot is enough for feeding
        (spec(2), (2, 2), (2,), 0, (2, True)),
        (spec(2), (1, 1, 1), (1, 1), 0, (2, True)),
        (spec(2), (1, 1, 1), (1,), 0, (1, True)),
        (spec(3), (3, 3), (3,), 0, (3, True)),
        # What other clusters may take is none for feeding.
        (spec(2), (2, 2, 2), (2, 2), 2, (2, True)),
        (spec(2), (2, 2, 2), (2, 2, 1), 2, (2, False)),
        # Nodes of more than half an executor cannot take the rest of it.
        (spec(2), (3, 3), (3,), 0, (1, False)),
        (spec(2), (4, 4, 4), (4,), 0, (1, False)),
        # Detached ones take nothing.
        (spec(2), (1, 1), (1,), 0, (1, False)),
        (spec(2, "detached"), (2, 2), (2,), 0, (2, False)),
        # Without any executor there is nothing to decide yet.
        (spec(2), (2, 2), (), 0, (0, False)),
    ],
)
def test_nodes_that_run_may_keep_their_slots_as_long_as_one_is_left(
    wanted: ClusterSpec,
    before: tuple[int, ...],
    now: tuple[int, ...],
    others: int,
    expected: tuple[int, bool],
) -> None:
    assert standing(wanted, Topology(YARN, before), Topology(YARN, now), others) == expected


def test_gpus_limit_the_room_of_nodes_that_run() -> None:
    assert standing(spec(2), with_gpus(1), with_gpus(1, cores=(4,))) == (1, False)
    both = with_gpus(2, 1.0), with_gpus(2, 1.0, cores=(4,))
    assert standing(spec(2), *both) == (2, True)


def test_a_count_says_what_there_is_for_whom() -> None:
    placing, now = choose_placing(spec(3), Topology(YARN, (2, 2))), Topology(YARN, (2,))
    assert stand(spec(3), placing, now, others=1).why == (
        "2 task slots (1 executor with [2] cores, spark.task.cpus=1) for 3 nodes "
        "and 1 of other clusters, with room for 2 of them"
    )


ENOUGH = Standing(3, False, "enough")
SHORT = Standing(3, True, "short")
FEWER = Standing(2, True, "fewer")


class Counts:
    """A watch, what it counts now, and what it has told."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.standing: Standing | None = ENOUGH
        self.told: list[Standing] = []
        self.watch = SlotWatch(3, lambda: self.standing, self.told.append, lambda: self.now_s)

    def look(self, standing: Standing | None, after_s: float = 0.0, is_lost: bool = False) -> None:
        self.standing = standing
        self.now_s += after_s
        self.watch.look(is_lost)


@pytest.fixture
def counts() -> Counts:
    return Counts()


def test_slots_as_at_the_launch_are_no_news(counts: Counts) -> None:
    counts.look(ENOUGH)
    counts.look(Standing(3, False, "even more"), LASTING_S)
    assert counts.told == []


def test_a_shortage_that_lasts_is_told_once(counts: Counts) -> None:
    counts.look(SHORT)
    counts.look(SHORT, LASTING_S - 0.1)
    assert counts.told == []
    counts.look(SHORT, 0.1)
    counts.look(SHORT, LASTING_S)
    assert counts.told == [SHORT]


def test_an_executor_that_is_replaced_soon_is_no_news(counts: Counts) -> None:
    counts.look(SHORT)
    counts.look(ENOUGH, LASTING_S - 0.1)
    counts.look(SHORT, 0.1)
    counts.look(SHORT, LASTING_S - 0.1)
    assert counts.told == []


def test_each_change_has_to_last(counts: Counts) -> None:
    counts.look(SHORT)
    counts.look(FEWER, LASTING_S)
    assert counts.told == []
    counts.look(FEWER, LASTING_S)
    counts.look(ENOUGH)
    counts.look(ENOUGH, LASTING_S)
    assert counts.told == [FEWER, ENOUGH]


def test_slots_that_are_missing_from_the_beginning_are_told(counts: Counts) -> None:
    """An executor was lost between the choice of the placement and the start."""
    counts.look(FEWER)
    counts.look(FEWER, LASTING_S)
    assert counts.told == [FEWER]


def test_where_slots_cannot_be_counted_the_loss_of_a_node_is_enough(counts: Counts) -> None:
    counts.look(None, LASTING_S)
    assert counts.told == []
    counts.look(None, is_lost=True)
    counts.look(None, is_lost=True)
    assert counts.told == [UNCOUNTED]


def test_one_node_and_one_slot_are_singular() -> None:
    with pytest.raises(ConfigError, match="1 node needs 1 task slot at once, and Spark has 0 task"):
        choose_placing(spec(1), Topology(YARN, (), most=()))
    assert choose_placing(spec(1), Topology(YARN, (1,))).why.startswith("1 slot for 1 node,")
