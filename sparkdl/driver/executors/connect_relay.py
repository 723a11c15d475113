"""Whether executors reach the client of a Spark Connect server, and a relay where they do not.

Runs in: driver
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sparkdl.control.server import ServerAddress
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import LaunchError
from sparkdl.core.jobs import cancel_jobs, named_jobs, tagged_jobs
from sparkdl.core.world import host_port
from sparkdl.driver.executors import relay_task
from sparkdl.driver.executors.sessions import by_value
from sparkdl.driver.threads import Thread, begin

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_REACH_S = 3.0
_STARTED_S = 60.0
_ATTEMPTS = 5
"""Spark gives the relay's Python ten seconds, and on a busy host its imports alone take longer."""
_JOIN_S = 5.0
TO_AVOID_IT = (
    "To avoid it, set SPARKDL_DRIVER_HOST and SPARKDL_DRIVER_PORT to an address of this machine "
    "that executors reach"
)


def why_unreached(
    spark: SparkSession, address: ServerAddress, tasks: int, timeout_s: float, thread: Thread
) -> str:
    """Return why executors cannot connect to this client.

    It is empty if all that run one of `tasks` can, or if Spark has no slot for them in time.
    """
    tag = f"sparkdl-reach-{secrets.token_hex(4)}"

    def ask() -> str:
        task = partial(_reach, address.host, address.port)
        with (
            tagged_jobs(spark, tag),
            named_jobs(spark, "sparkdl", "do executors reach this client?"),
            by_value(sys.modules[__name__]),
        ):
            frame = spark.range(tasks, numPartitions=tasks)
            rows = frame.mapInArrow(task, "problem string").collect()
        return next((row.problem for row in rows), "")

    asked = begin(ask, tag, thread)
    try:
        return asked.result() if asked.wait(timeout_s) else ""
    finally:
        if not asked.done():  # the time is over, or the wait was interrupted
            cancel_jobs(spark, tag)


def _reach(host: str, port: int, batches: Any) -> Iterator[pa.RecordBatch]:
    try:
        socket.create_connection((host, port), _REACH_S).close()
    except OSError as error:
        yield pa.record_batch({"problem": [f"{socket.gethostname()}: {error}"]})


class ClientRelay:
    """The relay of one cluster.

    Attributes:
        finding: after the start, where it is and why it is needed.
    """

    def __init__(self, spark: SparkSession, address: ServerAddress, why: str) -> None:
        self._spark, self._address, self._why = spark, address, why
        self.finding = ""
        self._closed = threading.Event()
        self._query: Any = None
        self._thread: threading.Thread | None = None

    def start(self, thread: Thread) -> ServerAddress:
        """Start the relay, and return where executors reach it.

        Raises:
            LaunchError: if the server cannot run it.
        """
        spark = self._spark
        for _ in range(_ATTEMPTS):
            name = f"sparkdl_{secrets.token_hex(6)}"
            port, problem = self._started(name)
            if port:
                break
            self._stop_query()
        else:
            raise LaunchError(
                f"executors cannot connect to this client at {self._address.host}:"
                f"{self._address.port} ({self._why}), and the Spark Connect server runs no relay: "
                f"{problem}. Set SPARKDL_DRIVER_HOST to an address of this machine that executors "
                "reach, and SPARKDL_DRIVER_PORT to a port open to them"
            )
        # The relay runs on the server's host, whose address Spark's own executors use.
        where = ServerAddress(
            str(spark.conf.get("spark.driver.host")).strip("[]"),
            int(port),
            self._address.is_encrypted,
        )
        target = (self._address.host, self._address.port)
        tunnel = relay_task.Tunnel(spark.conf, f"{name}.down", f"{name}.up", target)
        self._thread = thread(
            lambda: asyncio.run(tunnel.run(lambda: not self._closed.is_set())), f"sparkdl-{name}"
        )
        self._thread.start()
        self.finding = (
            f"executors cannot connect to this client at {host_port(*target)} ({self._why}): "
            f"messages go through a relay at {host_port(where.host, where.port)}, beside the Spark "
            "Connect server"
        )
        return where

    def _started(self, name: str) -> tuple[str, Any]:
        """Start the query; return the relay's port, or an empty one and why there is none."""
        spark = self._spark
        # A query is the way to a Python process on the server's host: its only micro-batch lasts as
        # long as the relay.
        one: Any = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
        try:
            with by_value(relay_task):
                writer = one.writeStream.foreachBatch(relay_task.Relay(spark, name))
            self._query = writer.trigger(availableNow=True).start()
            deadline = Deadline.after(_STARTED_S)
            while not deadline.has_passed:
                if port := spark.conf.get(f"{name}.port", ""):
                    return port, ""
                if not self._query.isActive:
                    return "", self._query.exception()
                threading.Event().wait(relay_task.LOOK_S)
        except Exception as error:  # noqa: BLE001 (Spark's, of several kinds)
            return "", error
        return "", f"it did not start within {_STARTED_S:g} s"

    def close(self) -> None:
        """End the relay."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        self._stop_query()

    def _stop_query(self) -> None:
        if self._query is not None:
            with suppress(Exception):  # the server is gone, perhaps
                self._query.stop()
