"""Placement of nodes: how many fit, their resources, and whether they keep their task slots.

Runs in: driver

It is decided before the launch, and again whenever slots come or go while nodes run.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from sparkdl.core.errors import ConfigError, ReservationTimeoutError, SparkConfigError
from sparkdl.core.listing import count
from sparkdl.core.spec import ClusterSpec

_GPU_ADVICE = (
    ". Or leave out spark.task.resource.gpu.amount, so that feeding tasks need no GPU: nodes ask "
    "Spark for their own"
)
_DYNAMIC = "spark.dynamicAllocation"
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*\]")
_MOST_EXECUTORS = 100_000
"""A larger `maxExecutors` is no limit."""
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
        task_gpus: GPUs that a task takes (`spark.task.resource.gpu.amount`). Below 1, tasks share a
            GPU.
        most: cores of each executor once all executors have started that Spark's settings allow;
            `None` if the settings give no limit.
    """

    master: str
    cores: tuple[int, ...]
    task_cpus: int = 1
    is_dynamic: bool = False
    executor_gpus: int = 0
    task_gpus: float = 0.0
    most: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls, master: str, cores: tuple[int, ...], get: Callable[[str, str], str | None]
    ) -> Topology:
        """Return the topology of an application, by its settings.

        Args:
            get: returns a setting of Spark's, or the default that is given.
        """
        # In local mode Spark assigns no GPUs and starts no executors, whatever the settings say.
        is_local = master.partition("[")[0] == "local"
        is_dynamic = not is_local and get(f"{_DYNAMIC}.enabled", "false") == "true"
        gpus = "0" if is_local else get("spark.executor.resource.gpu.amount", "0")
        task_gpus = "0" if is_local else get("spark.task.resource.gpu.amount", "0")
        return cls(
            master,
            cores,
            int(get("spark.task.cpus", "1") or 1),
            is_dynamic,
            int(gpus or 0),
            float(task_gpus or 0),
            cores if is_local else most_cores(master, is_dynamic, get),
        )

    @property
    def slots(self) -> int:
        """How many tasks run at once."""
        return self.room(self.task_cpus, self.task_gpus)

    @property
    def has_all(self) -> bool:
        """Whether no more slots can come."""
        return self.most is not None and replace(self, cores=self.most).slots <= self.slots

    @property
    def takes_profiles(self) -> bool:
        """Whether a node's task may request other resources than the session's tasks.

        Spark refuses task resource profiles on `local` and `local-cluster` masters.
        """
        return not self.master.startswith("local") and not self.is_dynamic

    def room(self, cpus: int, gpus: float) -> int:
        """Return how many tasks of so many cores and GPUs run at once."""
        if gpus <= 0:
            by_gpus = sys.maxsize
        elif gpus < 1:
            # Spark lets so many tasks share a GPU, and never splits a task's share over two.
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


def most_cores(
    master: str, is_dynamic: bool, get: Callable[[str, str], str | None]
) -> tuple[int, ...] | None:
    """Return the cores of each executor that Spark may ever start; `None` if there is no limit.

    YARN and Kubernetes start `spark.executor.instances` executors, 2 by default, of
    `spark.executor.cores` cores, 1 by default. A standalone master starts executors on each worker
    that registers, until the application has `spark.cores.max` cores; how these are split without
    `spark.executor.cores` is not known, so they count as those of one executor.
    """
    if found := _LOCAL_CLUSTER.fullmatch(master):
        return (int(found[2]),) * int(found[1])
    if master.startswith("spark://"):
        total, each = get("spark.cores.max", "") or "", get("spark.executor.cores", "") or ""
        has_gpus = get("spark.executor.resource.gpu.amount", "0") != "0"
        if not total or (has_gpus and not each):
            return None
        return (int(each),) * (int(total) // int(each)) if each else (int(total),)
    if master != "yarn" and not master.startswith("k8s://"):
        return None
    setting = f"{_DYNAMIC}.maxExecutors" if is_dynamic else "spark.executor.instances"
    number = get(setting, "" if is_dynamic else "2") or ""
    if not number.isdigit() or int(number) > _MOST_EXECUTORS:
        return None
    return (int(get("spark.executor.cores", "1") or 1),) * int(number)


Outlook = Literal["fits", "may fit", "never"]


def outlook(spec: ClusterSpec, topology: Topology) -> Outlook:
    """Return whether the nodes fit now, may fit when more executors come, or can never fit.

    Raises:
        SparkConfigError: if Spark's settings do not give the GPUs that are asked for.
    """
    return _outlook(spec.num_tasks, topology, _node_gpus(spec, topology))


def _outlook(nodes: int, topology: Topology, gpus: float) -> Outlook:
    most = topology if topology.most is None else replace(topology, cores=topology.most)
    if topology.room(topology.task_cpus, gpus) >= nodes:
        return "fits"
    if topology.most is not None and most.room(topology.task_cpus, gpus) < nodes:
        return "never"
    # Dynamic allocation starts executors for waiting tasks only, so a wait before the job is in
    # vain.
    return "fits" if topology.is_dynamic else "may fit"


@dataclass(frozen=True)
class Placing:
    """Whether nodes hold their slots, the resources of a node's task, and the reason.

    Attributes:
        node_cpus: cores of a node's task; `None` for what the session's tasks have, GPUs included.
        node_gpus: GPUs of a node's task, with `node_cpus`.
    """

    is_attached: bool
    node_cpus: int | None
    why: str
    node_gpus: float = 0.0


def choose_placing(spec: ClusterSpec, topology: Topology) -> Placing:
    """Decide between attached and detached nodes.

    Raises:
        ConfigError: if the cluster cannot hold the nodes; the message names the setting to change.
        ReservationTimeoutError: if it could hold them with executors that have not come yet.
    """
    nodes = spec.num_tasks
    is_fed = spec.is_fed
    gpus = _node_gpus(spec, topology)
    _check_room(nodes, topology, gpus)
    cpus = _node_cpus(nodes, topology)
    # Nodes that share an executor are better than none that can be fed.
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
    there = count(topology.slots, "slot")
    why = f"{there}, {count(nodes, 'node')}: {why}"
    if not attached:
        why = f"{there} for {count(nodes, 'node')}, which leaves none for feeding"
        cpus = None
    if cpus is None and gpus == topology.task_gpus:
        return Placing(attached, None, why)
    return Placing(attached, cpus or topology.task_cpus, why, gpus)


@dataclass(frozen=True)
class Standing:
    """A running cluster's need compared with the current task slots.

    Attributes:
        room: how many of its nodes fit.
        is_short: attached nodes may leave no slot for feeding.
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
    found = _outlook(nodes, topology, gpus)
    if found == "fits":
        return
    wants_more_gpus = gpus > topology.task_gpus
    room = topology.room(topology.task_cpus, gpus)
    text = (
        f"no room for {count(nodes, 'node')} with num_gpus={gpus:g}, only for {room}: "
        if wants_more_gpus
        else f"{needs(nodes)} at once, and Spark has "
    ) + topology.describe()
    if topology.most is not None and topology.most != topology.cores:
        room = replace(topology, cores=topology.most).room(topology.task_cpus, gpus)
        text += f", and room for {count(room, 'node')} once all executors are there"
    if found == "may fit":
        text += ". No more executors came in time: raise Startup(timeout_s=…) if they come later"
    text += ". Ask for fewer nodes (nodes=, num_executors=)"
    if wants_more_gpus:
        text += " or GPUs (num_gpus)"
    if gpus:
        text += ", or raise spark.executor.resource.gpu.amount"
    text += f", or {_more_slots(topology.master, nodes, topology.task_cpus, topology.is_dynamic)}"
    never = SparkConfigError if wants_more_gpus else ConfigError
    raise (never if found == "never" else ReservationTimeoutError)(text)


def _more_slots(master: str, nodes: int, task_cpus: int, is_dynamic: bool) -> str:
    """Return how an application on this master gets slots for so many nodes."""
    kind = master.partition("[")[0]
    if kind == "local":
        return (
            f"stop the session and start it with the master local[{nodes * task_cpus}] instead of "
            f"{master}, or run the nodes beside Spark, with executor='local'"
        )
    if kind == "local-cluster":
        return f"raise the number of executors or of their cores in {master}"
    if is_dynamic:
        limits = f"raise {_DYNAMIC}.maxExecutors or spark.executor.cores"
    elif master.startswith("spark://"):
        limits = "start more workers, raise spark.cores.max (--total-executor-cores)"
    elif master == "yarn" or master.startswith("k8s://"):
        limits = "raise spark.executor.instances or spark.executor.cores"
    else:
        limits = "raise the number of executors or of their cores"
    return limits + (", or lower spark.task.cpus" if task_cpus > 1 else "")


def _leaves_slots(nodes: int, topology: Topology, cpus: int, gpus: float) -> bool:
    """Whether a feeding task finds a slot beside so many nodes, wherever they are."""
    return topology.is_dynamic or topology.slots > nodes * topology.slots_of(cpus, gpus)


def _node_cpus(nodes: int, topology: Topology) -> int | None:
    """Return a node's cores so that each executor has one node and a free core, if that fits."""
    if not topology.takes_profiles:
        return None
    # All nodes are tasks of one stage with one profile, so the smallest executor decides.
    least = min(topology.cores)
    # More than half of the cores: a second node does not fit the executor, and a feeding task does.
    node_cpus = least // 2 + 1
    if node_cpus <= topology.task_cpus or node_cpus >= least or len(topology.cores) < nodes:
        return None
    return node_cpus


def _node_gpus(spec: ClusterSpec, topology: Topology) -> float:
    """Return how many GPUs a node's task requests from Spark.

    Raises:
        SparkConfigError: if Spark's settings do not give as many as asked for.
    """
    asked, given = _asked_gpus(spec, topology), topology.task_gpus
    if not topology.takes_profiles:
        if given and asked is not None and asked > max(1.0, given):
            raise SparkConfigError(
                f"num_gpus={spec.num_gpus}, and Spark gives a task {given:g} GPUs. Raise "
                "spark.task.resource.gpu.amount and spark.executor.resource.gpu.amount, or lower "
                "num_gpus"
            )
        return given
    # Spark has no GPUs to give here. Nodes claim those of their hosts themselves.
    if not topology.executor_gpus:
        return 0.0
    if asked is None:
        # A GPU each by default, unless then fewer nodes would fit.
        wanted = given or 1.0
        fits = topology.room(topology.task_cpus, wanted) >= spec.num_tasks
        return wanted if fits else given
    if asked > topology.executor_gpus:
        raise SparkConfigError(
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
    """Reports lasting changes in the slots for a running cluster.

    Args:
        nodes: of the cluster; at the beginning all have room and can be fed.
        count: counts the slots; returns `None` if they cannot be counted.
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
        # As at the launch, so that slots which are missing from the beginning count as a change.
        self._reported = self._seen = (nodes, False)
        self._since_s = now_s()

    def look(self, is_node_lost: bool = False) -> None:
        """Count again. Where slots cannot be counted, the loss of a node counts as a shortage."""
        standing = self._count()
        if standing is None:
            if not is_node_lost:
                return
            standing = UNCOUNTED
        # The text changes more often than its meaning: it names each executor.
        meaning = (standing.room, standing.is_short)
        if meaning != self._seen:
            self._seen, self._since_s = meaning, self._now_s()
        # A loss that cannot be counted cannot be confirmed by a later count either.
        lasts = standing is UNCOUNTED or self._now_s() - self._since_s >= LASTING_S
        if meaning != self._reported and lasts:
            self._reported = meaning
            self._on_counted(standing)
