"""Executors on lost hosts: no more tasks run there, and their blocks are forgotten."""

from __future__ import annotations

import logging
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sparkdl.driver.slots.spark_errors import raised_in_task

if TYPE_CHECKING:
    from pyspark import SparkContext

_log = logging.getLogger(__name__)

_left: dict[str, set[str]] = {}
"""The executors on hosts that have been given up, by application."""


def executors_left(sc: SparkContext) -> set[str]:
    return _left.get(str(sc.applicationId), set())


def executors_of(sc: SparkContext) -> list[Any]:
    found = sc._jsc.sc().statusStore().executorList(True)
    all_of_them = [found.apply(i) for i in range(found.size())]
    return [executor for executor in all_of_them if executor.id() != "driver"]


def leave_host(sc: SparkContext, host: str) -> None:
    """Stop Spark from starting tasks on a lost host, and from fetching blocks from it.

    By itself, Spark notices the loss of an executor only after `spark.network.timeout`, two minutes
    by default. Until then it feeds from there, and other executors fetch cached blocks, shuffle
    files and broadcast variables from there: those tasks neither end nor fail.
    """
    left = _left.setdefault(str(sc.applicationId), set())
    for executor in executors_of(sc):
        name = executor.hostPort().rpartition(":")[0].strip("[]")
        # Spark may call a host by its name, where the nodes are known by an address.
        if executor.id() in left or host not in (name, *_addresses(name)):
            continue
        left.add(executor.id())
        try:
            # Masters start the replacement on another host, and a lost host may come back.
            is_killed = sc._jsc.sc().killAndReplaceExecutor(executor.id())
        finally:  # the master may be gone as well
            is_forgotten = _forget(sc, executor.id(), name)
        if is_killed or is_forgotten:
            _log.warning(
                "Excluded executor %s on %s from further tasks: its host does not answer. Check "
                "the host and its network",
                executor.id(),
                host,
            )


def _forget(sc: SparkContext, executor_id: str, name: str) -> bool:
    """Make the driver forget an executor's cached blocks, and the shuffle files of its host."""
    try:
        spark = sc._jsc.sc()
        blocks = _call(sc, "SparkEnv", spark.env(), "blockManager", "storage.BlockManager")
        master = _call(sc, "storage.BlockManager", blocks, "master", "storage.BlockManagerMaster")
        # A master cannot kill an executor that does not answer, and until its heartbeat times out
        # other executors fetch from it. Its blocks are computed again elsewhere.
        master.removeExecutor(executor_id)
        # Its tasks are left to Spark's timeout: if they failed now, Spark would start the lost
        # node's task again at once, in a slot that feeding needs.
        spark.schedulerBackend().removeWorker("", name, "sparkdl has excluded this host")
    except Exception as error:  # noqa: BLE001 (py4j's, where this Spark lacks a method)
        _log.warning(
            "Spark %s keeps the blocks of executor %s until its heartbeat times out "
            "(spark.network.timeout): %s",
            sc.version,
            executor_id,
            raised_in_task(error),
        )
        return False
    return True


def _call(sc: SparkContext, kind: str, target: Any, method: str, returned: str) -> Any:
    """Call a method of one of Spark's classes without reflection, as py4j would use."""
    # Reflection loads the classes of all its methods, and pyspark lacks some of these (protobuf).
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
