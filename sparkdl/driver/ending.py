"""Begins and ends a cluster: its nodes, its coordinator, its Spark jobs; and handles Ctrl-C.

Python raises an interrupt in the main thread at an arbitrary point: there it would leave a cluster
half begun, and a second Ctrl-C would interrupt the clean-up of the first. So one thread owns the
cluster (`_own`): it starts everything, waits for a request to end, and lets another thread end it.
The user's thread only waits. It asks for the end by putting a number into a `SimpleQueue`, one call
of C, which an interrupt cannot leave half done.

Why not install a SIGINT handler? It would protect from SIGINT alone, would not end a call that
waits in Spark or in a storage, and would have to call the handler it replaces.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial, wraps
from queue import SimpleQueue
from traceback import walk_tb
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import LaunchError, NodeFailedError
from sparkdl.core.texts import listed
from sparkdl.driver.controller import Controller
from sparkdl.driver.executors.executor import Executor
from sparkdl.driver.lifecycle.state import Stopped, StopRequested
from sparkdl.driver.threads import Changed, Outcome

_log = logging.getLogger(__name__)

STOP_MARGIN_S = 10.0
"""How long agents and executors may take to end, beyond the time that children are given."""
_BEGIN_S = 5.0
"""How long an interrupted launch waits for its thread to begin: it may never have been started."""


class Ending:
    """Begins one cluster and ends it. It exists before the cluster does.

    Args:
        executor: of this cluster alone; closed at the end in any case.

    Attributes:
        ask: requests the end; children get this many seconds to end by themselves. It may be called
            several times: the shortest time counts.
        controller: set during the launch, before nodes start.
        first: called before the nodes are ended.
    """

    def __init__(self, cluster_id: str, executor: Executor) -> None:
        self._asks: SimpleQueue[float | None] = SimpleQueue()
        self.ask = self._asks.put
        self.controller: Controller | None = None
        self.first: Callable[[], None] = lambda: None
        self.is_asked = False
        self._cluster_id = cluster_id
        self._executor = executor
        self._changed = Changed()
        self._is_starting = False
        self._has_begun = False
        self.is_over = False

    def is_wanted(self) -> bool:
        """Whether the end has not been asked for."""
        return self._asks.empty() and not self.is_asked

    def begin(self, start: Callable[[], Controller]) -> Controller:
        """Run `start` in the thread that will also end the cluster; return its result."""
        outcome: Outcome[Controller] = Outcome()
        own = partial(self._own, partial(outcome.of, partial(self._start, start)))
        thread = self._executor.thread(own, f"sparkdl-cluster-{self._cluster_id}")
        # Set first: an interrupt between the two lines makes `wait` wait for a moment in vain, and
        # the other way round it would not wait for a cluster that begins.
        self._is_starting = True
        thread.start()
        return outcome.result()

    def wait(self) -> None:
        """Wait until the cluster has ended completely, after `ask`."""
        # An interrupt may have come before the thread began: it will start nothing then.
        begin_s = _BEGIN_S if self._is_starting else 0.0
        if self._changed.wait_for(lambda: self._has_begun, Deadline.after(begin_s)):
            self._changed.wait_for(lambda: self.is_over, Deadline.after(None))

    def _start(self, start: Callable[[], Controller]) -> Controller:
        with self._changed:
            self._has_begun = True
            self._changed.notify_all()
        if not self.is_wanted():
            raise LaunchError("launch cancelled")
        return start()

    def _own(self, start: Callable[[], None]) -> None:
        start()
        grace_s = self._asks.get()
        self.is_asked = True
        assert grace_s is not None
        # In a thread of its own, so that this one can shorten the time when it is asked again; not
        # a daemon, so that the interpreter waits for it at the end of a program.
        name = f"sparkdl-end-{self._cluster_id}"
        threading.Thread(target=self._end, args=(grace_s,), name=name, daemon=False).start()
        while (grace_s := self._asks.get()) is not None:
            if self.controller:
                self.controller.submit(StopRequested(grace_s, grace_s + STOP_MARGIN_S))

    def _end(self, grace_s: float) -> None:
        steps = (
            # Streams first: their queries would go on starting jobs.
            self.first,
            self._executor.cancel_feeds,
            partial(self._stop, grace_s),
            self._close,  # before the controller: a late task learns of the end
            *([self.controller.close] if self.controller else ()),
        )
        try:
            for step in steps:
                try:
                    step()
                except Exception:  # noqa: BLE001 (Spark is gone, perhaps; the next steps run)
                    _log.warning(
                        "Stopping a part of the cluster failed; processes of its nodes may remain "
                        "until their executors end",
                        exc_info=True,
                    )
        finally:
            with self._changed:
                self.is_over = True
                self._changed.notify_all()
            # Ends the loop of `_own`.
            self._asks.put(None)

    def _close(self) -> None:
        self._executor.close(Deadline.after(STOP_MARGIN_S))

    def _stop(self, grace_s: float) -> None:
        controller, margin_s = self.controller, grace_s + STOP_MARGIN_S
        if controller is None or not controller.submit(StopRequested(grace_s, margin_s)):
            return
        # A second more than the state's own deadline, which names the agents that are left.
        is_stopped = controller.wait_for(
            lambda view: isinstance(view.state, Stopped), Deadline.after(margin_s + 1)
        )
        left = controller.look(lambda view: getattr(view.state, "left_behind", ()))
        if left or not is_stopped:
            _log.warning(
                "Agents did not end in time and were disconnected: %s. They exit once "
                "disconnected; check their hosts if a GPU or port stays in use",
                listed(left),
            )


class _Endable(Protocol):
    @property
    def ending(self) -> Ending:
        """The thread that ends the cluster."""


C = TypeVar("C", bound=_Endable)
P = ParamSpec("P")
T = TypeVar("T")


def ends_if_interrupted(method: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
    """End the cluster on Ctrl-C in a method, or on an interrupt of a notebook's kernel.

    The traceback begins here: where in sparkdl, py4j or Spark the interrupt came, or where the
    failure of a node was noticed, is of no use to the user.
    """

    @wraps(method)
    def call(cluster: C, /, *args: P.args, **options: P.kwargs) -> T:
        ending, handled = cluster.ending, sys.exc_info()[1]
        try:
            try:
                return method(cluster, *args, **options)
            except Exception as error:
                if is_interrupt(error, handled):
                    raise KeyboardInterrupt from None
                raise
        except KeyboardInterrupt:
            ending.ask(0.0)  # before anything that another interrupt could come into
            ending.wait()
            raise KeyboardInterrupt("training interrupted; all nodes were stopped") from None
        except NodeFailedError as error:
            raise error.with_traceback(None) from error.__cause__

    return call


def is_interrupt(error: BaseException, handled: BaseException | None = None) -> bool:
    """Whether an error was caused by Ctrl-C.

    Spark's handler of the signal calls the JVM. If a second signal interrupts that call, the
    handler may raise an error of py4j's, and the interrupted code sees nothing else.

    Args:
        handled: what the caller was handling before, an earlier Ctrl-C perhaps.
    """
    handler = getattr(signal.getsignal(signal.SIGINT), "__code__", None)
    each: BaseException | None = error
    seen: list[int] = []
    while each is not None and each is not handled and id(each) not in seen:
        if isinstance(each, KeyboardInterrupt):
            return True
        if any(frame.f_code is handler for frame, _ in walk_tb(each.__traceback__)):
            return True
        seen.append(id(each))
        each = each.__cause__ or each.__context__
    return False
