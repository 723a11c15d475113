"""Whether executors reach the client of a Spark Connect server, and a relay where they do not.

Runs in: driver
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sparkdl.control.server import ServerAddress
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import LaunchError
from sparkdl.driver.executors import relay_task
from sparkdl.driver.executors.sessions import by_value
from sparkdl.driver.threads import Thread

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)
_REACH_S = 3.0
_STARTED_S = 60.0
_ATTEMPTS = 2
_JOIN_S = 5.0


def why_unreached(spark: SparkSession, address: ServerAddress, tasks: int) -> str:
    """Return why executors cannot connect to this client; empty if all tested ones can."""
    frame = spark.range(tasks, numPartitions=tasks)
    rows = frame.mapInArrow(partial(_reach, address.host, address.port), "problem string").collect()
    return next((row.problem for row in rows), "")


def _reach(host: str, port: int, batches: Any) -> Iterator[pa.RecordBatch]:
    try:
        socket.create_connection((host, port), _REACH_S).close()
    except OSError as error:
        yield pa.record_batch({"problem": [f"{socket.gethostname()}: {error}"]})


class ClientRelay:
    """The relay of one cluster; as long as it lives, `address` leads to the client."""

    def __init__(self, spark: SparkSession, address: ServerAddress, why: str) -> None:
        self._spark, self._address, self._why = spark, address, why
        self._closed = threading.Event()
        self._query: Any = None
        self._thread: threading.Thread | None = None

    def start(self, thread: Thread) -> ServerAddress:
        """Start the relay, and return where executors reach it.

        Raises:
            LaunchError: if the server cannot run it.
        """
        spark = self._spark
        # Spark gives the Python process ten seconds, and the first one may need longer to import.
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
        _log.warning(
            "Executors cannot connect to this client at %s:%d (%s): messages go through a relay at "
            "%s:%d, beside the Spark Connect server. To avoid it, set SPARKDL_DRIVER_HOST and "
            "SPARKDL_DRIVER_PORT to an address that executors reach",
            *(*target, self._why, where.host, where.port),
        )
        return where

    def _started(self, name: str) -> tuple[str, Any]:
        """Start the query; return the relay's port, or an empty one and why there is none."""
        spark = self._spark
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
