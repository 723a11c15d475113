"""Whatever is interrupted wherever, no cluster is left that the next call does not end."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from itertools import count
from typing import Any

import pytest

import sparkdl
from sparkdl.control.messages import ChildReady, ChildReturned, Hello
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import LaunchError, ResultError
from sparkdl.core.options import Feeding, Recovery
from sparkdl.core.settings import Environment, Settings
from sparkdl.core.spec import ClusterSpec, NodeSpec, plan_nodes
from sparkdl.driver.ending import Ending, ends_if_interrupted, is_interrupt
from sparkdl.driver.executors.executor import Launch
from sparkdl.driver.lifecycle import state as states
from sparkdl.driver.options import Observe
from tests.doubles.until import until

launching = import_module("sparkdl.driver.launch")

SOON_S = 10.0


class Interrupts:
    """Interrupts this thread where it comes to a certain place.

    Python raises an interrupt when a function of its own begins, and when one of C has returned.
    The profiler is called in just these places, and what it raises is raised there.

    Args:
        first: the number of the place.
        second: how many places later it is interrupted again; 0 for not at all. The first
            interrupt then comes at the beginning of a function: places are counted by these.

    Attributes:
        has_come: the first of two.
        are_over: whether it got to all of them.
    """

    def __init__(self, first: int, second: int = 0) -> None:
        self._first, self._second = first, second
        self._left = first
        self.has_come = False
        self.are_over = False

    def during(self, call: Callable[[], Any]) -> Any:
        """Call; return what it does, or the interrupt or error that it has raised."""
        tracer = sys.gettrace()  # of coverage, perhaps
        try:
            gc.disable()  # what it finalizes it would at any place
            if self._second:
                sys.settrace(self._trace)
            sys.setprofile(self._profile)
            return call()
        except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001 (the test looks at it)
            return error
        finally:
            self._left = 0  # no interrupt comes any more
            sys.settrace(tracer)
            sys.setprofile(None)
            gc.enable()

    def __repr__(self) -> str:
        return f"Interrupts({self._first}, {self._second})"

    def raise_first(self) -> None:
        """Raise the first of two here."""
        sys.settrace(None)
        self.has_come, self._left = True, self._second
        raise KeyboardInterrupt

    def _trace(self, frame: Any, event: str, arg: Any) -> None:
        if not self.has_come and _counts(frame):
            self._left -= 1
            if self._left == 0:
                self.has_come, self._left = True, self._second
                raise KeyboardInterrupt

    def _profile(self, frame: Any, event: str, arg: Any) -> None:
        if event not in ("call", "c_return") or self.has_come != bool(self._second):
            return
        if not self.are_over and _counts(frame):
            self._left -= 1
            if self._left == 0:
                self.are_over = True
                raise KeyboardInterrupt


def _counts(frame: Any) -> bool:
    """Whether an interrupt may come here.

    `Thread.start` may leave a thread that never runs, if it is interrupted. That is Python's own,
    and happens before such a thread has begun anything. What is raised in a finalizer or in a weak
    reference's callback Python itself drops.
    """
    while frame is not None:
        if frame.f_code.co_name == "__del__" or "weakref" in frame.f_code.co_filename:
            return False
        if frame.f_code in (threading.Thread.start.__code__, threading.Thread.__init__.__code__):
            return False
        frame = frame.f_back
    return True


class PlayedNodes:
    """An executor whose nodes are there as soon as they are started, and go when they are told."""

    def __init__(self) -> None:
        self.ending: Ending | None = None
        self.has_started = False
        self.closed = threading.Event()
        self._spec: Any = None

    def gathering(self) -> AbstractContextManager[None]:
        return nullcontext()

    def driver_host(self) -> str:
        return "127.0.0.1"

    def start(self, launch: Launch, on_broken: Callable[[Any], object]) -> None:
        self.has_started = True
        self._spec = launch.spec
        for node in launch.spec.nodes:
            agent = f"agent-{node.node_id}"
            hello = Hello(node.node_id, "", agent, "127.0.0.1", 1, "grpc://x", "process")
            self._say(states.AgentJoined(hello))
            self._say(states.AgentReady(agent, ChildReady(0, 9000 + node.node_id)))

    def finish(self) -> None:
        for node in self._spec.nodes:
            said = ChildReturned(0, b"\xc0")
            self._say(states.ResultReported(f"agent-{node.node_id}", said))

    def relaunch(self, nodes: Sequence[NodeSpec]) -> None:
        pass

    def leave_host(self, host: str) -> None:
        pass

    def forget_task(self, node: NodeSpec) -> None:
        pass

    def thread(self, run: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(target=run, name=name, daemon=True)

    def is_there(self) -> bool:
        return True

    def cancel_feeds(self, feed: str | None = None) -> None:
        """Have the nodes go: the end has come."""
        if self._spec:
            self._say(states.StopRequested(0.0, 1.0))
        self.go()

    def go(self) -> None:
        for node in self._spec.nodes if self._spec else ():
            self._say(states.AgentLeft(f"agent-{node.node_id}", "it was told to go"))

    def close(self, deadline: Deadline) -> None:
        self.closed.set()

    def _say(self, event: states.Event) -> None:
        assert self.ending
        assert self.ending.controller
        self.ending.controller.submit(event)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[PlayedNodes]:
    """The nodes of all clusters that are launched, which are played here."""
    made: list[PlayedNodes] = []

    class Known(Ending):
        def __init__(self, cluster_id: str, executor: Any) -> None:
            super().__init__(cluster_id, executor)
            executor.ending = self
            made.append(executor)

    monkeypatch.setattr(launching, "Ending", Known)
    return made


def start(is_fed: bool = False) -> sparkdl.Cluster:
    settings = Settings(recovery=Recovery(hang_timeout_s=None), feeding=Feeding(fed=is_fed))
    spec = ClusterSpec("played", plan_nodes(2), "plain", settings=settings)
    watch = launching._Watch(Observe(progress=False), None, None, None)
    nodes, environment = PlayedNodes(), Environment()
    cluster: sparkdl.Cluster = launching._start(spec, nodes, environment, b"", watch, None)
    return cluster


def ends(nodes: PlayedNodes, within_s: float = SOON_S) -> bool:
    ending = nodes.ending
    assert ending
    is_over = ending._changed.wait_for(lambda: ending.is_over, Deadline.after(within_s))
    return is_over and nodes.closed.is_set()


def call_aside(call: Callable[[], Any]) -> Any:
    """Call in another thread, for which this one may have left no lock behind."""
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(call()), daemon=True)
    thread.start()
    thread.join(SOON_S)
    assert outcome, "a lock was left behind, or the end does not come"
    return outcome[0]


def alone() -> Iterator[Interrupts]:
    """Yield an interrupt at each place, until the call gets through without."""
    for first in count(1):
        interrupts = Interrupts(first)
        yield interrupts
        if not interrupts.are_over:
            return


def in_pairs(step: int = 5) -> Iterator[Interrupts]:
    """Yield an interrupt at the beginning of each `step`th function, with a second at each place.

    With 1 it takes minutes on a small machine.
    """
    for first in count(1, step):
        for second in count(1):
            interrupts = Interrupts(first, second)
            yield interrupts
            if not interrupts.are_over:
                break
        if not interrupts.has_come:
            return


@pytest.mark.parametrize("interrupts_of", [alone, in_pairs])
def test_interrupted_launch_ends_by_itself_what_it_has_begun(
    nodes: list[PlayedNodes], interrupts_of: Callable[[], Iterator[Interrupts]]
) -> None:
    begun = 0
    for interrupts in interrupts_of():
        nodes.clear()
        got = interrupts.during(start)
        if isinstance(got, sparkdl.Cluster):
            call_aside(got.abort)
        else:
            assert isinstance(got, KeyboardInterrupt)
        for each in nodes:
            begun += each.has_started
            assert not each.has_started or ends(each), interrupts
    assert begun > 10, "some interrupts came when nodes had been started"


@pytest.mark.parametrize(
    ("method", "interrupts_of"),
    [(method, alone) for method in ("wait", "results", "shutdown", "abort")]
    + [("shutdown", in_pairs)],
)
def test_interrupted_call_leaves_a_cluster_that_the_next_call_ends(
    nodes: list[PlayedNodes], interrupts_of: Callable[[], Iterator[Interrupts]], method: str
) -> None:
    for interrupts in interrupts_of():
        cluster = start(is_fed=True)
        if method != "abort":
            nodes[-1].finish()
        interrupts.during(getattr(cluster, method))
        call_aside(cluster.abort)
        assert ends(nodes[-1]), interrupts


def test_interrupted_wait_in_which_a_second_one_falls_has_asked_for_the_end_already(
    nodes: list[PlayedNodes],
) -> None:
    """Nobody calls anything afterwards: the first interrupt was enough."""
    for second in count(1):
        cluster = start()
        interrupts = Interrupts(sys.maxsize, second)

        @ends_if_interrupted
        def wait(cluster: sparkdl.Cluster, interrupts: Interrupts = interrupts) -> None:
            interrupts.raise_first()

        interrupts.during(lambda: wait(cluster))  # noqa: B023 (called at once)
        assert ends(nodes[-1])
        if not interrupts.are_over:
            assert second > 5
            return


def test_abort_acts_at_once_behind_a_shutdown_that_waits(nodes: list[PlayedNodes]) -> None:
    cluster = start()
    with ThreadPoolExecutor(2) as pool:
        shutdown = pool.submit(cluster.shutdown)
        with_limit = pool.submit(cluster.shutdown, timeout_s=1000)
        waiters = cluster._controller.changed._waiters
        assert until(lambda: len(waiters) == 2)
        call_aside(cluster.abort)
        assert nodes[-1].closed.is_set()
        for waiting in (shutdown, with_limit):
            with pytest.raises(ResultError, match="aborted before worker:0, worker:1 had returned"):
                waiting.result(SOON_S)
    cluster.shutdown()


class Py4JError(Exception):
    """What py4j raises where a second signal comes into a call to the JVM."""


@pytest.fixture
def _spark_handles() -> Iterator[None]:
    """A handler as pyspark's: it calls the JVM before it raises, and that call may fail."""

    def handle(_number: int, _frame: Any) -> None:
        raise Py4JError("An error occurred while calling o26.cancelAllJobs")

    before = signal.signal(signal.SIGINT, handle)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_spark_handles")
def test_error_of_py4j_that_leaves_the_handler_is_an_interrupt(nodes: list[PlayedNodes]) -> None:
    cluster = start()

    @ends_if_interrupted
    def wait(cluster: sparkdl.Cluster) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="training interrupted"):
        wait(cluster)
    assert ends(nodes[-1])


@pytest.mark.usefixtures("_spark_handles")
def test_other_errors_are_no_interrupts_even_behind_one(nodes: list[PlayedNodes]) -> None:
    cluster = start()

    @ends_if_interrupted
    def fail(cluster: sparkdl.Cluster) -> None:
        raise LaunchError("mine")

    def fail_behind(error: BaseException) -> None:
        try:
            raise error
        except BaseException:  # noqa: BLE001 (whatever a user handles)
            fail(cluster)

    for before in (KeyboardInterrupt(), Py4JError()):
        with pytest.raises(LaunchError, match="mine"):
            fail_behind(before)
    assert cluster.status() == "Running"
    assert is_interrupt(KeyboardInterrupt())
    assert not is_interrupt(Py4JError())
    cluster.abort()
