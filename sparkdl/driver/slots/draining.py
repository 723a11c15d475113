"""Executors that Spark decommissions: they get no more tasks, and end when theirs have ended.

A standalone worker or an executor gets the notice as SIGPWR, which a pod's preStop hook sends;
YARN's resource manager announces it for a host. Spark's scheduler collects all these notices and
informs no listener, so it is polled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.driver.slots.advice import is_true

if TYPE_CHECKING:
    from pyspark import SparkContext

LOOK_S = 1.0
"""The polling period. A spot instance is gone thirty seconds after its notice, or later."""
_SETTING = "spark.decommission.enabled"


def can_drain(sc: SparkContext | None) -> bool:
    """Whether Spark may decommission executors; over Spark Connect it cannot be asked."""
    return sc is not None and is_true(sc.getConf().get(_SETTING, "false"))


def draining_executors(sc: SparkContext | None) -> frozenset[str]:
    """Return Spark's ids of the live executors that are being decommissioned."""
    if sc is None or not can_drain(sc):
        return frozenset()
    # As one text, in one call of py4j for all ids.
    pending = sc._jsc.sc().taskScheduler().executorsPendingDecommission()
    return frozenset(filter(None, pending.keySet().mkString(",").split(",")))
