"""Where nodes go: how many fit, what each asks of Spark, and whether they keep their task slots.

Runs in: driver

It is decided before the launch, and again whenever slots come or go while nodes run.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from sparkdl.core.errors import ConfigError
from sparkdl.core.listing import count
from sparkdl.core.spec import ClusterSpec, InputMode

_GPU_ADVICE = (
    ". Or leave out spark.task.resource.gpu.amount, so that feeding tasks need no GPU: nodes ask "
    "Spark for their own"
)
LOOK_S = 2.0
"""Between two counts."""
LASTING_S = 5.0
"""How long a count must last before it is reported: a lost executor may be replaced soon."""


@dataclass(frozen=True)
class Topology:
    """The task slots of a Spark application.

    Attributes:
        master: Spark's master URL.
        cores: cores of each live executor.
        task_cpus: cores that a task takes (`spark.task.cpus`).
        is_dynamic: whether Spark may add and remove executors.
        executor_gpus: GPUs of each executor (`spark.executor.resource.gpu.amount`).
        task_gpus: GPUs that a task takes (`spark.task.resource.gpu.amount`). Where it is below 1,
            tasks share one.
    """

    master: str
    cores: tuple[int, ...]
    task_cpus: int = 1
    is_dynamic: bool = False
    executor_gpus: int = 0
    task_gpus: float = 0.0

    @property
    def slots(self) -> int:
        """How many tasks run at once."""
        return self.room(self.task_cpus, self.task_gpus)

    @property
    def takes_profiles(self) -> bool:
        """Whether a node's task may ask for something else than the session's tasks do.

        Spark refuses task resource profiles on `local` and `local-cluster` masters.
        """
        return not self.master.startswith("local") and not self.is_dynamic and bool(self.cores)

    def room(self, cpus: int, gpus: float) -> int:
        """Return how many tasks of so many cores and GPUs run at once."""
        if gpus <= 0:
            by_gpus = sys.maxsize
        elif gpus < 1:
            by_gpus = self.executor_gpus * int(1 / gpus)
        else:
            by_gpus = self.executor_gpus // int(gpus)
        return sum(min(cores // cpus, by_gpus) for cores in self.cores)

    def slots_of(self, cpus: int, gpus: float) -> int:
        """Return how many slots a task of so many cores and GPUs takes at most."""
        by_gpus = math.ceil(gpus / self.task_gpus) if self.task_gpus else 0
        return max(math.ceil(cpus / self.task_cpus), by_gpus)

    def describe(self) -> str:
        """Return the slots in words."""
        gpus = (
            f", {count(self.executor_gpus, 'GPU')} each, "
            f"spark.task.resource.gpu.amount={self.task_gpus:g}"
            if self.executor_gpus
            else ""
        )
        return (
            f"{count(self.slots, 'task slot')} ({count(len(self.cores), 'executor')} with "
            f"{list(self.cores)} cores, spark.task.cpus={self.task_cpus}{gpus})"
        )


@dataclass(frozen=True)
class Placing:
    """Whether nodes hold their slots, what a node's task asks of Spark, and why.

    Attributes:
        node_cpus: cores of a node's task; `None` for what the session's tasks have, GPUs included.
        node_gpus: GPUs of a node's task, with `node_cpus`.
    """

    is_attached: bool
    node_cpus: int | None
    why: str
    node_gpus: float = 0.0


def choose_placing(spec: ClusterSpec, topology: Topology | None) -> Placing:
    """Decide between attached and detached nodes.

    Raises:
        ConfigError: if the cluster cannot hold the nodes; the message names the setting to change.
    """
    nodes = spec.num_tasks
    is_fed = spec.input_mode is InputMode.SPARK
    if topology is None:
        attached = spec.placement != "detached"
        return Placing(attached, None, "the slots of a Spark Connect session cannot be counted")
    gpus = _node_gpus(spec, topology)
    _check_room(nodes, topology, gpus)
    cpus = _node_cpus(nodes, topology)
    if cpus is not None and is_fed and not _leaves_slots(nodes, topology, cpus, gpus):
        cpus = None
    has_spare = _leaves_slots(nodes, topology, cpus or topology.task_cpus, gpus)
    if spec.placement == "attached" and is_fed and not has_spare:
        raise ConfigError(
            f"placement='attached' keeps all {topology.slots} slots, so no feeding task could run; "
            "add an executor or a core, or use placement='detached'"
            + (_GPU_ADVICE if topology.task_gpus and topology.takes_profiles else "")
        )
    attached = spec.placement == "attached" or (
        spec.placement == "auto" and (has_spare or not is_fed)
    )
    if not attached and topology.is_dynamic:
        raise ConfigError(
            "detached nodes hold no slot, so spark.dynamicAllocation would remove their executors; "
            "set spark.dynamicAllocation.enabled=false, or placement='attached'"
        )
    why = "spare slots feed" if is_fed else "nothing has to be fed"
    slots = count(topology.slots, "slot")
    why = f"{slots}, {count(nodes, 'node')}: {why}"
    if not attached:
        why = f"{slots} for {count(nodes, 'node')}, which leaves none for feeding"
        cpus = None
    if cpus is None and gpus == topology.task_gpus:
        return Placing(attached, None, why)
    return Placing(attached, cpus or topology.task_cpus, why, gpus)


@dataclass(frozen=True)
class Standing:
    """What the slots that are there now mean for a cluster that runs.

    Attributes:
        room: how many of its nodes fit.
        is_short: nodes that keep their slots may leave none for feeding.
        why: in words.
    """

    room: int
    is_short: bool
    why: str


UNCOUNTED = Standing(sys.maxsize, True, "a node was lost, and the slots left cannot be counted")
"""Over Spark Connect, and when Spark does not answer."""


def stand(spec: ClusterSpec, placing: Placing, topology: Topology, others: int = 0) -> Standing:
    """Decide again, while nodes run, whether they may keep their slots.

    Args:
        others: slots that other clusters of the application may take.
    """
    cpus = placing.node_cpus or topology.task_cpus
    gpus = topology.task_gpus if placing.node_cpus is None else placing.node_gpus
    room = min(spec.num_tasks, topology.room(cpus, gpus))
    held = room * topology.slots_of(cpus, gpus) + others
    is_short = placing.is_attached and 0 < topology.slots <= held
    text = f"{topology.describe()} for {count(spec.num_tasks, 'node')}"
    if others:
        text += f" and {others} of other clusters"
    if room < spec.num_tasks:
        text += f", with room for {room} of them"
    return Standing(room, is_short, text)


def needs(nodes: int) -> str:
    """Return `2 nodes need 2 task slots`."""
    return f"{count(nodes, 'node')} need{'s' if nodes == 1 else ''} {count(nodes, 'task slot')}"


def _check_room(nodes: int, topology: Topology, gpus: float) -> None:
    room = topology.room(topology.task_cpus, gpus)
    if room >= nodes or topology.is_dynamic:
        return
    if gpus > topology.task_gpus:
        raise ConfigError(
            f"no room for {count(nodes, 'node')} with num_gpus={gpus:g}, but for {room}: "
            f"{topology.describe()}. Ask for fewer nodes (nodes=, num_executors=) or GPUs "
            "(num_gpus), or raise spark.executor.resource.gpu.amount or spark.executor.instances"
        )
    raise ConfigError(
        f"{needs(nodes)} at once, and Spark has {topology.describe()}. "
        "Ask for fewer nodes (nodes=, num_executors=), or raise spark.executor.instances, "
        "spark.executor.cores or spark.cores.max, or lower spark.task.cpus"
    )


def _leaves_slots(nodes: int, topology: Topology, cpus: int, gpus: float) -> bool:
    """Whether a feeding task finds a slot beside so many nodes, wherever they are."""
    return topology.is_dynamic or topology.slots > nodes * topology.slots_of(cpus, gpus)


def _node_cpus(nodes: int, topology: Topology) -> int | None:
    """Return cores that leave one node per executor and a core for feeders, if that fits."""
    if not topology.takes_profiles:
        return None
    least = min(topology.cores)
    node_cpus = least // 2 + 1
    if node_cpus <= topology.task_cpus or node_cpus >= least or len(topology.cores) < nodes:
        return None
    return node_cpus


def _node_gpus(spec: ClusterSpec, topology: Topology) -> float:
    """Return how many GPUs a node's task is to have from Spark.

    Raises:
        ConfigError: if Spark's settings do not give as many as asked for.
    """
    asked, given = _asked_gpus(spec, topology), topology.task_gpus
    if not topology.takes_profiles:
        if given and asked is not None and asked > max(1.0, given):
            raise ConfigError(
                f"num_gpus={spec.num_gpus}, and Spark gives a task {given:g} GPUs. Raise "
                "spark.task.resource.gpu.amount and spark.executor.resource.gpu.amount, or lower "
                "num_gpus"
            )
        return given
    if not topology.executor_gpus:
        return 0.0
    if asked is None:
        wanted = given or 1.0
        fits = topology.room(topology.task_cpus, wanted) >= spec.num_tasks
        return wanted if fits else given
    if asked > topology.executor_gpus:
        raise ConfigError(
            f"num_gpus={spec.num_gpus}, and Spark gives an executor {topology.executor_gpus} GPUs. "
            "Raise spark.executor.resource.gpu.amount, or lower num_gpus"
        )
    return float(asked)


def _asked_gpus(spec: ClusterSpec, topology: Topology) -> int | None:
    """Return the GPUs for the node that wants most, since all nodes are tasks of one stage."""
    counts = [spec.gpus_of(node) for node in spec.nodes[spec.driver_nodes :]]
    most = max((count for count in counts if count is not None), default=0)
    return most if None not in counts or most > max(1.0, topology.task_gpus) else None


class SlotWatch:
    """Reports what the slots mean for a running cluster, each time that this changes for good.

    Args:
        nodes: of the cluster; at the beginning all have room and can be fed.
        count: returns what the slots mean now; `None` if they cannot be counted.
        on_counted: called with the report.
        now_s: a monotonic clock.
    """

    def __init__(
        self,
        nodes: int,
        count: Callable[[], Standing | None],
        on_counted: Callable[[Standing], object],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count = count
        self._on_counted = on_counted
        self._now_s = now_s
        self._reported = self._seen = (nodes, False)
        self._since_s = now_s()

    def look(self, is_node_lost: bool = False) -> None:
        """Count again. Where slots cannot be counted, the loss of a node counts as a shortage."""
        standing = self._count()
        if standing is None:
            if not is_node_lost:
                return
            standing = UNCOUNTED
        meaning = (standing.room, standing.is_short)
        if meaning != self._seen:
            self._seen, self._since_s = meaning, self._now_s()
        lasts = standing is UNCOUNTED or self._now_s() - self._since_s >= LASTING_S
        if meaning != self._reported and lasts:
            self._reported = meaning
            self._on_counted(standing)
