"""One trial of a search on a sub-cluster of its own, and its end before time.

Runs in: driver
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ResultError
from sparkdl.driver.handle import Cluster
from sparkdl.driver.launch import launch

Objective = Callable[[dict[str, Any], Any], Any]
_LOOK_S = 5.0


class PrunedError(Exception):
    """The trial is not worth going on with."""


@dataclass(frozen=True)
class Nodes:
    """A sub-cluster for each trial, on which `objective(params, ctx)` runs.

    Attributes:
        options: of `sparkdl.launch`.
        timeout_s: for one trial.
        stop: ends the trials that run, once it is set.
    """

    spark: Any
    objective: Objective
    nodes: int
    metric: str
    timeout_s: float | None
    options: Mapping[str, Any] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)

    def __call__(self, params: dict[str, Any], report: Callable[[int, float], bool]) -> float:
        """Run a trial; return its value.

        Args:
            report: is told of a step and the metric then; tells whether to give up.

        Raises:
            PrunedError: if `report` said so; the nodes have been ended.
            NodeFailedError: if a node failed; and whatever `launch` and `Cluster.results` raise.
            ResultError: if no number came of it.
        """
        options = {"input_mode": "own", "framework": "plain", **self.options}
        deadline = Deadline.after(self.timeout_s)
        with launch(self.spark, self.objective, params, self.nodes, **options) as cluster:
            self._follow(cluster, report, deadline)
            results = cluster.results(deadline.wait_s)
        return value_of(results[0], self.metric)

    def _follow(
        self, cluster: Cluster, report: Callable[[int, float], bool], deadline: Deadline
    ) -> None:
        last = -1
        while not deadline.has_passed:
            if self.stop.is_set():
                raise PrunedError
            step, metrics = cluster.reported(last, min(_LOOK_S, deadline.remaining_s))
            if step > last:
                last = step
                if self.metric in metrics and report(step, metrics[self.metric]):
                    raise PrunedError
                continue
            with suppress(TimeoutError):
                cluster.wait(0.0)
                return


def value_of(result: Any, metric: str) -> float:
    """Return the number in what an objective returned: itself, or its entry `metric`.

    Raises:
        ResultError: if there is none.
    """
    value: Any = result.get(metric) if isinstance(result, Mapping) else result
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ResultError(
            f"the objective returned {result!r} on rank 0: a number is needed, or a dict with "
            f"{metric!r}"
        )
    return float(value)
