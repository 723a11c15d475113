"""What can be known to fail before anything starts, and which settings to change.

Runs in: driver
"""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark import SparkContext
from pyspark.resource import ResourceProfile, ResourceProfileBuilder, TaskResourceRequests
from pyspark.sql import SparkSession

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import (
    ConfigError,
    LaunchError,
    ReservationTimeoutError,
    SparkdlError,
)
from sparkdl.core.jobs import context_of, raised_in_task
from sparkdl.core.spec import ClusterSpec, InputMode
from sparkdl.driver.slots.placement import (
    Placing,
    Standing,
    Topology,
    more_slots,
    needs,
    outlook,
    stand,
)
from sparkdl.driver.slots.queue import Need, Turn, gate_of
from sparkdl.node.task import parse_problem

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)

EXECUTORS_WAIT_S = 15.0
"""How long to wait for executors that are to come, where not a launch says how long."""
_SILENT_S = 2.0
"""How long a wait for executors is not worth a line of the log."""
YOUNG_S = 30.0
SPARE_WAIT_S = 3.0
"""How long to wait for a slot for feeding where an application has run for less than `YOUNG_S`: it
may still get executors."""
_POLL_S = 0.05
_SLOW_POLL_S = 0.5
_CONNECT_POLL_S = 1.0
_LEAST_SHOWN = 2
_DYNAMIC = "spark.dynamicAllocation.enabled"
_NEEDED = ("sparkdl", "pyarrow", "numpy", "pandas", "cloudpickle", "msgspec", "psutil")
"""What the task of a node imports."""
_SPLITS = ("spark.default.parallelism", "spark.sql.leafNodeDefaultParallelism")


_ARROW = "spark.sql.execution.arrow"
_UNIX_SOCKETS_SINCE = (4, 1)
_FEW_ROWS = 1000
_MAX_VAR_NBYTES = 2**31
_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def read_topology(
    spark: SparkSession, spec: ClusterSpec, timeout_s: float = EXECUTORS_WAIT_S
) -> Topology | None:
    """Return the slots there are, having waited for executors without which the nodes do not fit.

    A young application is given a moment for the slot that feeding needs beside the nodes', too,
    and a longer one where Spark's settings say that more executors are to come.

    Args:
        timeout_s: how long to wait where more executors may come. Where the nodes can never fit
            there is no wait.

    Returns:
        `None` where it cannot be known: over Spark Connect.

    Raises:
        ConfigError: if Spark's settings do not give the GPUs that are asked for.
    """
    sc = context_of(spark)
    if sc is None:
        return None
    # A local cluster starts a lost executor again within seconds.
    is_young = time.time() - sc.startTime / 1000 < YOUNG_S
    may_get_spare = is_young or str(sc.master).startswith("local-cluster")
    is_fed = spec.input_mode is InputMode.SPARK
    wait = _ExecutorWait(spec.num_tasks, timeout_s)
    for_spare: Deadline | None = None
    while True:
        topology = _topology(sc)
        found = outlook(spec, topology)
        if found == "may fit":
            if not wait.goes_on(topology.describe()):
                return topology
            may_get_spare |= wait.has_warned
            continue
        has_spare = not is_fed or topology.slots > spec.num_tasks or topology.is_dynamic
        if found == "never" or has_spare or topology.has_all:
            return topology
        if for_spare is None:
            spare_s = SPARE_WAIT_S if topology.most is None else EXECUTORS_WAIT_S
            for_spare = Deadline.after(spare_s if may_get_spare else 0.0)
        if for_spare.has_passed:
            return topology
        threading.Event().wait(_POLL_S)


class _ExecutorWait:
    """A wait for executors, which the log mentions once it has lasted for a moment."""

    def __init__(self, nodes: int, timeout_s: float, poll_s: float = _POLL_S) -> None:
        self.has_warned = False
        self._nodes, self._timeout_s, self._poll_s = nodes, timeout_s, poll_s
        self._deadline, self._silence = Deadline.after(timeout_s), Deadline.after(_SILENT_S)
        self._pause = threading.Event()

    def goes_on(self, there: str) -> bool:
        """Wait for a moment; return whether there was time left.

        Args:
            there: the slots that there are.
        """
        if self._deadline.has_passed:
            return False
        if self._silence.has_passed and not self.has_warned:
            self.has_warned = True
            _log.warning(
                "Waiting up to %g s for executors: %s at once, and Spark has %s",
                *(self._timeout_s, needs(self._nodes), there),
            )
        self._pause.wait(_SLOW_POLL_S if self.has_warned else self._poll_s)
        return True


def check_slots_over_connect(
    spark: SparkSession, num_nodes: int, timeout_s: float = EXECUTORS_WAIT_S
) -> int | None:
    """Check that a Spark Connect server has a slot for each node, as far as can be known.

    Args:
        timeout_s: how long to wait for executors that may come.

    Returns:
        How many slots there are for certain; `None` if the server does not show it.

    Raises:
        ConfigError: if it has fewer, and no more can come.
        ReservationTimeoutError: if it has fewer when the time is over.
    """
    master = str(spark.conf.get("spark.master", ""))
    is_local = master.partition("[")[0] == "local"
    cpus = int(spark.conf.get("spark.task.cpus", "1") or 1)
    wait = _ExecutorWait(num_nodes, timeout_s, _CONNECT_POLL_S)
    while True:
        slots = slots_over_connect(spark)
        if slots is None:
            return None
        if slots >= num_nodes:
            # Spark shows 2 where a cluster has fewer.
            return 1 if slots == _LEAST_SHOWN and not is_local else slots
        most = Topology.of(master, (slots,), spark.conf.get).most
        never = most is not None and Topology.of(master, most, spark.conf.get).slots < num_nodes
        if never or not wait.goes_on(f"{slots} at the Spark Connect server"):
            raise (ConfigError if never else ReservationTimeoutError)(
                f"{needs(num_nodes)} at once, and the Spark Connect "
                f"server has {slots}. Ask for fewer nodes (nodes=, num_executors=), or "
                f"{more_slots(master, num_nodes, cpus, what='server')}"
            )


def slots_over_connect(spark: SparkSession) -> int | None:
    """Return how many tasks a Spark Connect server runs at once; `None` if it does not show.

    It shows its number of cores by how it splits a range, unless that is set otherwise.
    """
    conf = spark.conf
    if any(conf.get(name, None) for name in _SPLITS) or conf.get(_DYNAMIC, "false") == "true":
        return None
    plan = "".join(row[0] for row in spark.sql("EXPLAIN SELECT * FROM range(1)").collect())
    found = re.search(r"splits=(\d+)", plan)
    return int(found[1]) // int(conf.get("spark.task.cpus", "1") or 1) if found else None


def turn_of(
    session: SparkSession, spec: ClusterSpec, topology: Topology | None, placing: Placing
) -> Turn | None:
    """Return the turn that the cluster has to wait for.

    `None` where slots cannot be counted, or come on demand: no cluster waits there.
    """
    if topology is None or topology.is_dynamic:
        return None
    cpus = placing.node_cpus or topology.task_cpus
    gpus = topology.task_gpus if placing.node_cpus is None else placing.node_gpus
    need = Need(
        spec.cluster_id,
        spec.num_tasks,
        spec.num_tasks * topology.slots_of(cpus, gpus),
        spec.input_mode is InputMode.SPARK and placing.is_attached,
        topology.room(cpus, gpus),
    )
    context = session.sparkContext
    gate = gate_of(str(context.applicationId))
    timeout_s = spec.settings.reservation_timeout_s
    return Turn(gate, need, lambda: _topology(context).slots, timeout_s)


def counting(
    session: SparkSession, spec: ClusterSpec, placing: Placing, topology: Topology | None
) -> Callable[[], Standing | None] | None:
    """Return a function that counts the slots; it returns `None` when it cannot.

    Returns:
        `None` where slots do not matter: nothing is fed, or Spark adds executors on demand.
    """
    if spec.input_mode is not InputMode.SPARK:
        return None
    if topology is None:
        is_dynamic = session.conf.get("spark.dynamicAllocation.enabled", "false") == "true"
        return (lambda: None) if placing.is_attached and not is_dynamic else None
    sc = session.sparkContext
    if topology.is_dynamic or _is_local(sc):
        return None
    gate = gate_of(str(sc.applicationId))

    def count() -> Standing | None:
        try:
            return stand(spec, placing, _topology(sc), gate.others(spec.cluster_id))
        except Exception:  # noqa: BLE001 (Spark is ending, perhaps; which error varies)
            _log.debug("The slots of %s cannot be counted", spec.cluster_id, exc_info=True)
            return None

    return count


def node_profile(placing: Placing) -> ResourceProfile | None:
    """Return what a node's task asks of Spark, or `None` for the session's default.

    A profile of cores alone would have no GPUs, whatever `spark.task.resource.gpu.amount` says.
    """
    if placing.node_cpus is None:
        return None
    requests = TaskResourceRequests().cpus(placing.node_cpus)
    if placing.node_gpus:
        requests.resource("gpu", placing.node_gpus)
    return ResourceProfileBuilder().require(requests).build


def explain_job_failure(error: Exception) -> SparkdlError:
    """Turn the failure of the nodes' Spark job into the error that says what to change."""
    text = str(error)
    problem = parse_problem(text)
    if problem is not None:
        return problem.at_driver()
    if "PYTHON_VERSION_MISMATCH" in text:
        detail = next(line for line in text.splitlines() if "PYTHON_VERSION_MISMATCH" in line)
        return ConfigError(
            f"driver and executors run different versions of Python: {detail.strip()}. Set "
            "PYSPARK_PYTHON (or spark.pyspark.python) to the same version on all machines"
        )
    if lacking := re.search(f"No module named '({'|'.join(_NEEDED)})'", text):
        return ConfigError(
            f"the executors' Python has no {lacking[1]}; install sparkdl-cluster there, or ship an "
            "environment with spark.archives and point PYSPARK_PYTHON into it"
        )
    if absent := re.search(r'Cannot run program "[^\n]*', text):
        return ConfigError(
            f"an executor starts no Python: {absent[0]}. Set PYSPARK_PYTHON (or "
            "spark.pyspark.python) to one that is there on all machines"
        )
    return LaunchError(f"the Spark job that carries the nodes failed: {raised_in_task(error)}")


def _is_local(sc: SparkContext) -> bool:
    return str(sc.master).partition("[")[0] == "local"


def _topology(sc: SparkContext) -> Topology:
    if _is_local(sc):
        return _of(sc, (sc.defaultParallelism,))
    left = _left.get(str(sc.applicationId), ())
    cores = [there.totalCores() for there in _executors(sc) if there.id() not in left]
    return _of(sc, tuple(count for count in cores if count))


def _executors(sc: SparkContext) -> list[Any]:
    """Return Spark's summaries of its executors."""
    found = sc._jsc.sc().statusStore().executorList(True)
    all_of_them = [found.apply(i) for i in range(found.size())]
    return [executor for executor in all_of_them if executor.id() != "driver"]


_left: dict[str, set[str]] = {}
"""By application, the executors that were on hosts that have been given up."""


def leave_host(sc: SparkContext, host: str, is_there: bool) -> None:
    """Have Spark start no more tasks on a host that is given up, and look for nothing there.

    Left alone, Spark notices the loss of one that does not answer after `spark.network.timeout`,
    two minutes by default. Until then it feeds from there, and other executors fetch cached blocks,
    shuffle files and broadcast variables from there: those tasks neither end nor fail.

    Args:
        is_there: it is cut off from other hosts alone.
    """
    left = _left.setdefault(str(sc.applicationId), set())
    # Replaced, because the host may come back; other masters start it elsewhere. But one that is
    # there would get the next one from a standalone master at once.
    is_replaced = not (is_there and str(sc.master).startswith("spark://"))
    is_replaced |= is_true(sc.getConf().get(_DYNAMIC, "false"))  # Spark allows nothing else then
    for executor in _executors(sc):
        name = executor.hostPort().rpartition(":")[0].strip("[]")
        if executor.id() in left or host not in (name, *_addresses(name)):
            continue
        left.add(executor.id())
        spark = sc._jsc.sc()
        kill = spark.killAndReplaceExecutor if is_replaced else spark.killExecutor
        try:
            is_killed = kill(executor.id())
        finally:  # the master may be gone as well
            is_forgotten = _forget(sc, executor.id(), name)
        if is_killed or is_forgotten:
            _log.warning(
                "Excluded executor %s on %s from further tasks: its host was given up",
                executor.id(),
                host,
            )


def _forget(sc: SparkContext, executor_id: str, name: str) -> bool:
    """Have the driver forget the cached blocks of an executor, and the shuffle files of its host.

    A master cannot kill what does not answer, and until its heartbeat times out other executors
    fetch from there. What it held is computed again elsewhere. Its tasks are left to Spark: it
    would start that of the lost node again at once, in a slot that feeding needs.

    Args:
        name: what Spark calls its host.
    """
    try:
        spark = sc._jsc.sc()
        blocks = _call(sc, "SparkEnv", spark.env(), "blockManager", "storage.BlockManager")
        master = _call(sc, "storage.BlockManager", blocks, "master", "storage.BlockManagerMaster")
        master.removeExecutor(executor_id)
        spark.schedulerBackend().removeWorker("", name, "sparkdl has given up this host")
    except Exception as error:  # noqa: BLE001 (which py4j raises for what another Spark lacks)
        _log.warning(
            "Spark %s forgets the blocks of executor %s not at once, but when its heartbeat times "
            "out (spark.network.timeout): %s",
            sc.version,
            executor_id,
            raised_in_task(error),
        )
        return False
    return True


def _call(sc: SparkContext, kind: str, target: Any, method: str, returned: str) -> Any:
    """Call a method of one of Spark's classes without reflection, by which py4j finds methods.

    Reflection would load the classes of all its methods, of which pyspark lacks some (protobuf).
    """
    jvm: Any = sc._jvm
    java = jvm.java.lang
    of, returns = (java.Class.forName(f"org.apache.spark.{name}") for name in (kind, returned))
    kinds = java.invoke.MethodType.methodType(returns)
    handle = java.invoke.MethodHandles.publicLookup().findVirtual(of, method, kinds)
    arguments = jvm.java.util.ArrayList()
    arguments.add(target)
    return handle.invokeWithArguments(arguments)


def _addresses(name: str) -> set[str]:
    with suppress(OSError):
        return {str(found[4][0]) for found in socket.getaddrinfo(name, None)}
    return set()


def _of(sc: SparkContext, cores: tuple[int, ...]) -> Topology:
    return Topology.of(str(sc.master), cores, sc.getConf().get)


@dataclass(frozen=True)
class Advice:
    """What to set in Spark, and why."""

    setting: str
    why: str
    level: int = logging.INFO


def costly_settings(conf: Mapping[str, str], version: str) -> list[Advice]:
    """Return the settings that make feeding slower or batches fail; none if all is well.

    Args:
        conf: what is set; what is missing has Spark's default.
        version: Spark's.
    """
    found = []
    unix = "spark.python.unix.domain.socket.enabled"
    if _release(version) >= _UNIX_SOCKETS_SINCE and not is_true(conf.get(unix)):
        why = (
            "rows go from the JVM to Python by TCP; by a Unix socket feeding was 30 to 50 % faster"
        )
        found.append(Advice(f"{unix}=true", f"{why}. To be set before the session starts"))
    rows = conf.get(f"{_ARROW}.maxRecordsPerBatch", "")
    if rows.isdigit() and 0 < int(rows) < _FEW_ROWS:
        why = f"batches of {rows} rows cost more in passing them on than in their rows"
        found.append(Advice(f"{_ARROW}.maxRecordsPerBatch=10000", why))
    nbytes = _nbytes(conf.get(f"{_ARROW}.maxBytesPerBatch", "64m"))
    is_large = is_true(conf.get(f"{_ARROW}.useLargeVarTypes"))
    if not is_large and (nbytes <= 0 or nbytes >= _MAX_VAR_NBYTES):
        why = "batches are not bounded, and one with 2 GiB of strings or binary in a column fails"
        found.append(Advice(f"{_ARROW}.maxBytesPerBatch=64m", why, logging.WARNING))
    if is_true(conf.get("spark.speculation")):
        why = (
            "a feeding task that waits for the trainer looks slow, and its partition is read twice"
        )
        found.append(Advice("spark.speculation=false", why, logging.WARNING))
    if is_true(conf.get("spark.dynamicAllocation.enabled")):
        why = "executors that idle between two feeds are removed and have to be started again"
        found.append(Advice("spark.dynamicAllocation.minExecutors to those you need", why))
    if conf.get("spark.python.worker.reuse", "true").lower() == "false":
        why = "every feeding task starts a Python and imports pyarrow anew"
        found.append(Advice("spark.python.worker.reuse=true", why, logging.WARNING))
    return found


def costly_settings_of(spark: SparkSession) -> list[Advice]:
    """Return the settings of a session that cost speed."""
    names = (
        "spark.python.unix.domain.socket.enabled",
        f"{_ARROW}.maxRecordsPerBatch",
        f"{_ARROW}.maxBytesPerBatch",
        f"{_ARROW}.useLargeVarTypes",
        "spark.speculation",
        "spark.dynamicAllocation.enabled",
        "spark.python.worker.reuse",
    )
    values = {name: spark.conf.get(name, None) for name in names}
    conf = {name: str(value) for name, value in values.items() if value is not None}
    return costly_settings(conf, spark.version)


def log_costly_settings(spark: SparkSession) -> None:
    """Log a line for each setting that costs speed."""
    try:
        found = costly_settings_of(spark)
    except Exception:  # noqa: BLE001 (advice is not worth a failed launch)
        _log.debug("Spark's settings cannot be read", exc_info=True)
        return
    for advice in found:
        _log.log(advice.level, "Set %s: %s", advice.setting, advice.why)


def encrypting_setting(spark: SparkSession) -> str:
    """Return the setting by which Spark encrypts its own connections; empty if it does not.

    https://spark.apache.org/docs/latest/security.html#network-encryption
    """
    names = (
        "spark.network.crypto.enabled",
        "spark.ssl.rpc.enabled",
        "spark.ssl.enabled",
        "spark.authenticate.enableSaslEncryption",
    )
    return next((name for name in names if is_true(spark.conf.get(name, None))), "")


def is_true(value: str | None) -> bool:
    """Return whether a setting of Spark's is true."""
    return value is not None and value.lower() == "true"


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _nbytes(text: str) -> int:
    """Return how many bytes Spark takes `text` for, like `64m`, `64MB`, `67108864`."""
    found = re.fullmatch(r"(-?\d+)\s*([kmgt]?)i?b?", text.strip().lower())
    return int(found[1]) * _UNITS.get(found[2], 1) if found else 1
