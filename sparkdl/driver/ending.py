"""The end of a cluster: its nodes, its coordinator, its Spark jobs; and Ctrl-C, which brings it.

Runs in: driver
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import NodeFailedError
from sparkdl.driver.controller import Controller
from sparkdl.driver.executors.executor import Executor
from sparkdl.driver.state import StopAsked, Stopped
from sparkdl.driver.threads import begin

_log = logging.getLogger(__name__)

STOP_MARGIN_S = 10.0


class _Endable(Protocol):
    def abort(self) -> None:
        """End all nodes at once."""


C = TypeVar("C", bound=_Endable)
P = ParamSpec("P")
T = TypeVar("T")


def ends_if_interrupted(
    method: Callable[Concatenate[C, P], T],
) -> Callable[Concatenate[C, P], T]:
    """Have Ctrl-C in a method, or the interrupt of a notebook's kernel, end the cluster.

    What is raised begins here: where in sparkdl, py4j or Spark the interrupt came, or where it was
    noticed that a node had failed, tells nobody anything.
    """

    @wraps(method)
    def call(cluster: C, /, *args: P.args, **options: P.kwargs) -> T:
        try:
            return method(cluster, *args, **options)
        except KeyboardInterrupt:
            cluster.abort()
            raise KeyboardInterrupt("the training was ended, and all its nodes with it") from None
        except NodeFailedError as error:
            raise error.with_traceback(None) from error.__cause__

    return call


def end_nodes(controller: Controller, executor: Executor, grace_s: float) -> None:
    """End feeds and nodes, then the coordinator and the nodes' job.

    That is done in a thread of its own: who is interrupted a second time leaves nothing behind.

    Args:
        grace_s: what children get to end by themselves.
    """
    name = f"sparkdl-end-{controller.spec.cluster_id}"
    is_mine = threading.Lock()

    def end() -> None:
        if is_mine.acquire(blocking=False):
            _end(controller, executor, grace_s)

    try:
        begin(end, name, _thread).result()
    except KeyboardInterrupt:
        begin(end, name, _thread)  # for it may have come before the first had begun
        raise


def _thread(run: Callable[[], None], name: str) -> threading.Thread:
    return threading.Thread(target=run, name=name, daemon=False)  # a program's end waits for it


def _end(controller: Controller, executor: Executor, grace_s: float) -> None:
    with suppress(Exception):  # Spark is gone, perhaps, and the feeds with it
        executor.cancel_feeds()
    margin_s = grace_s + STOP_MARGIN_S
    controller.submit(StopAsked(grace_s, margin_s))
    is_stopped = controller.wait_for(
        lambda view: isinstance(view.state, Stopped), Deadline.after(margin_s + 1)
    )
    left = controller.look(lambda view: getattr(view.state, "left_behind", ()))
    if left or not is_stopped:
        _log.warning("Agents did not end in time and were disconnected: %s", ", ".join(left))
    controller.close()
    executor.close(Deadline.after(STOP_MARGIN_S))
