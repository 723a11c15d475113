"""Placement of nodes: how many fit, their GPUs, and whether they keep their task slots.

It is decided once, before the launch.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from sparkdl.core.errors import (
    ConfigError,
    ReservationTimeoutError,
    SparkConfigError,
    SparkdlError,
)
from sparkdl.core.listing import count
from sparkdl.core.spec import ClusterSpec

_DYNAMIC = "spark.dynamicAllocation"
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*\]")
_MOST_EXECUTORS = 100_000
"""A larger `maxExecutors` is no limit."""


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
    gpus = _node_gpus(spec, topology)
    if _fits(spec, topology, gpus):
        return "fits"
    most = topology.most
    if most is not None and not _fits(spec, replace(topology, cores=most), gpus):
        return "never"
    # Dynamic allocation starts executors for waiting tasks only, so a wait before the job is in
    # vain.
    return "fits" if topology.is_dynamic else "may fit"


@dataclass(frozen=True)
class Placing:
    """Whether nodes keep their slots, and why.

    Attributes:
        node_gpus: GPUs that a node's task requests; `None` for what the session's tasks have.
    """

    is_attached: bool
    why: str
    node_gpus: float | None = None


def is_attached(spec: ClusterSpec, is_dynamic: bool) -> bool:
    """Whether nodes keep their slots: `auto` where Spark feeds none, or adds slots on demand."""
    if spec.placement == "auto":
        return is_dynamic or not spec.is_fed
    return spec.placement == "attached"


def choose_placing(spec: ClusterSpec, topology: Topology) -> Placing:
    """Decide between attached and detached nodes.

    Raises:
        ConfigError: if the cluster cannot hold the nodes; the message names the setting to change.
        ReservationTimeoutError: if it could hold them with executors that have not come yet.
    """
    gpus = _node_gpus(spec, topology)
    if (found := outlook(spec, topology)) != "fits":
        raise _refusal(spec, topology, gpus, found)
    attached = is_attached(spec, topology.is_dynamic)
    if not attached and topology.is_dynamic:
        raise ConfigError(
            "detached nodes hold no slot, so spark.dynamicAllocation would remove their executors; "
            "set spark.dynamicAllocation.enabled=false, or placement='attached'"
        )
    there = f"{count(topology.slots, 'slot')}, {count(spec.num_tasks, 'node')}"
    why = "Spark's tasks feed them" if spec.is_fed else "nothing has to be fed"
    return Placing(attached, f"{there}: {why}", None if gpus == topology.task_gpus else gpus)


def needs(nodes: int) -> str:
    """Return `2 nodes need 2 task slots`."""
    return f"{count(nodes, 'node')} need{'s' if nodes == 1 else ''} {count(nodes, 'task slot')}"


def _feeds_beside(spec: ClusterSpec, topology: Topology) -> bool:
    """Whether feeding tasks need a slot beside those that the nodes keep."""
    return spec.is_fed and not topology.is_dynamic and is_attached(spec, False)


def _fits(spec: ClusterSpec, topology: Topology, gpus: float) -> bool:
    if topology.room(topology.task_cpus, gpus) < spec.num_tasks:
        return False
    by_gpus = math.ceil(gpus / topology.task_gpus) if topology.task_gpus else 0
    taken = spec.num_tasks * max(1, by_gpus)
    return not _feeds_beside(spec, topology) or topology.slots > taken


def _refusal(spec: ClusterSpec, topology: Topology, gpus: float, found: Outlook) -> SparkdlError:
    nodes = spec.num_tasks
    wants_more_gpus = gpus > topology.task_gpus
    room = topology.room(topology.task_cpus, gpus)
    needed = f"{needs(nodes)} at once"
    lacks_feeder = room >= nodes
    if lacks_feeder:
        needed += ", and one more for feeding tasks (placement='attached')"
    if wants_more_gpus and room < nodes:
        needed = f"no room for {count(nodes, 'node')} with num_gpus={gpus:g}, only for {room}"
    text = f"{needed}, and Spark has {topology.describe()}"
    if topology.most is not None and topology.most != topology.cores:
        room = replace(topology, cores=topology.most).room(topology.task_cpus, gpus)
        text += f", and room for {count(room, 'node')} once all executors are there"
    if found == "may fit":
        text += ". No more executors came in time: raise Startup(timeout_s=…) if they come later"
    text += ". Ask for fewer nodes (nodes=, num_executors=)"
    if lacks_feeder:
        text += " or for placement='detached'"
    if wants_more_gpus:
        text += " or GPUs (num_gpus)"
    if gpus:
        text += ", or raise spark.executor.resource.gpu.amount"
    text += f", or {_more_slots(topology.master, nodes, topology.task_cpus, topology.is_dynamic)}"
    never = SparkConfigError if wants_more_gpus else ConfigError
    return (never if found == "never" else ReservationTimeoutError)(text)


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
