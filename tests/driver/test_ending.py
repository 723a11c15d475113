"""Whatever is interrupted wherever, no cluster is left that the next call does not end."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import count
from typing import Any

import pytest

import sparkdl
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import LaunchError, ResultError
from sparkdl.core.options import Feeding, Recovery
from sparkdl.core.settings import Environment, Settings
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.driver.ending import Ending, ends_if_interrupted, is_interrupt
from sparkdl.driver.options import Observe
from tests.doubles.interrupts import Interrupts, PlayedNodes
from tests.doubles.until import until

launching = import_module("sparkdl.driver.launch")

SOON_S = 10.0


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
    spec = ClusterSpec(
        "played",
        plan_nodes(2),
        "plain",
        settings=Settings(recovery=Recovery(hang_timeout_s=None), feeding=Feeding(fed=is_fed)),
    )
    cluster: sparkdl.Cluster = launching._start(
        spec,
        PlayedNodes(),
        Environment(),
        b"",
        launching._Watch(Observe(progress=False), None, None, None),
        None,
    )
    return cluster


def ends(nodes: PlayedNodes, within_s: float = SOON_S) -> bool:
    """Wait until nothing is left of a cluster."""
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
    """Yield an interrupt at the beginning of a function, with a second at each place behind.

    Args:
        step: every so manieth function; 1 takes minutes on a small machine.
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


# Ctrl-C under Spark's handler of the signal.


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
def test_error_of_py4j_that_comes_out_of_the_handler_is_an_interrupt(
    nodes: list[PlayedNodes],
) -> None:
    cluster = start()

    @ends_if_interrupted
    def wait(cluster: sparkdl.Cluster) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="the training was ended"):
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
