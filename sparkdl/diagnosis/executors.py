"""Runs one Spark job that asks every executor, with a limit on its time.

Runs in: driver
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from sparkdl.core.deadline import Deadline
from sparkdl.core.jobs import cancel_jobs, named_jobs, tagged_jobs
from sparkdl.core.world import host_port
from sparkdl.diagnosis import probe
from sparkdl.diagnosis.desk import Desk
from sparkdl.diagnosis.facts import Facts
from sparkdl.driver.executors.sessions import by_value, inheriting_thread

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_GRACE_S = 15.0
"""How long the job may go on after all executors have reported."""


@dataclass(frozen=True)
class Survey:
    """The answers of the executors.

    Attributes:
        facts: one for each executor that reported.
        silent: executors that started a task but reported nothing more.
        tasks: how many of the `expected` tasks started.
        url: the address at which executors reach the driver's desk.
        error: the error of the Spark job, if it failed.
    """

    facts: tuple[Facts, ...]
    silent: tuple[Facts, ...]
    tasks: int
    expected: int
    url: str
    error: Exception | None = None


def survey(
    spark: SparkSession,
    desk: Desk,
    looks: Mapping[str, list[str]],
    limit_s: float,
    at: tuple[str, int],
) -> Survey:
    """Ask all executors, by as many tasks as run at once; ends within some limits of time.

    Args:
        desk: open; if it could not be opened, the job alone brings what there is.
        looks: what `diagnosis/look.py` is to look at.
        limit_s: for each of that.
        at: the host and port at which executors reach the desk.
    """
    host, port = at
    order = {
        "host": host,
        "port": port,
        "token": desk.token,
        "wait_s": desk.wait_s,
        "limit_s": limit_s,
        "looks": dict(looks),
    }
    job = _Job(spark, order, desk)
    began_s, deadline = time.monotonic(), Deadline.after(desk.wait_s + limit_s + _GRACE_S)
    job.start()
    try:
        desk.wait(deadline)
        # Tasks unknown to the desk need as long as the others, unless Spark has no slot.
        more_s = time.monotonic() - began_s + _GRACE_S
        job.join(min(more_s, deadline.remaining_s) if desk.visitors else deadline.remaining_s)
    finally:
        is_over = job.cancel()
        desk.close()
    known = {each.executor: each for each in job.rows}
    for name, visitor in desk.visitors.items():
        if visitor.facts is not None:
            known[name] = visitor.facts
    silent = [v.hello for name, v in desk.visitors.items() if name not in known]
    return Survey(
        tuple(known.values()),
        tuple(silent),
        max(desk.tasks, job.tasks),
        desk.expected,
        host_port(host, port) if host else "",
        # A job that was cancelled here has failed for that reason alone.
        job.error if is_over else None,
    )


class _Job:
    """The job, in a thread."""

    def __init__(self, spark: SparkSession, order: dict[str, Any], desk: Desk) -> None:
        self.rows: list[Facts] = []
        self.tasks = 0
        self.error: Exception | None = None
        self._spark = spark
        self._order = order
        self._desk = desk
        self._tag = f"sparkdl-doctor-{secrets.token_hex(4)}"
        self._thread = inheriting_thread(spark, self._run, self._tag)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def cancel(self) -> bool:
        """End it if it still runs; return whether it had ended by itself."""
        if not self._thread.is_alive():
            return True
        with suppress(Exception):  # Spark is gone, perhaps
            cancel_jobs(self._spark, self._tag)
        self._thread.join(_GRACE_S)
        return False

    def _run(self) -> None:
        tasks = self._desk.expected
        try:
            with (
                tagged_jobs(self._spark, self._tag),
                named_jobs(self._spark, "sparkdl doctor", "looking at the executors"),
                # By value, because an executor may lack sparkdl, or have another one.
                by_value(probe),
            ):
                # As many tasks as slots, so that each executor gets one.
                frame = self._spark.range(tasks, numPartitions=tasks)
                rows = frame.mapInArrow(partial(probe.answer, self._order), "facts string")
                found = [json.loads(row.facts) for row in rows.collect()]
            self.tasks = len(found)
            self.rows = [msgspec.convert(each, Facts) for each in found if each]
        except Exception as error:  # noqa: BLE001 (whatever it is, it is what the report says)
            self.error = error
        finally:
            # Whatever became of the job, tasks that wait at the desk must not wait for it.
            self._desk.begin()
