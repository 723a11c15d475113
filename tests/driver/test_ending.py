"""Whatever is interrupted wherever, no cluster is left that the next call does not end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import pytest

import sparkdl
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import LaunchError, NodeFailedError, ResultError
from sparkdl.core.settings import Environment, Settings
from sparkdl.core.spec import ClusterSpec, InputMode, plan_nodes
from sparkdl.driver.changed import Changed
from sparkdl.driver.ending import Ending, ends_if_interrupted, is_interrupt
from sparkdl.driver.threads import run_aside
from tests.doubles.interrupts import Interrupts, PlayedNodes

launching = import_module("sparkdl.driver.launch")

SOON_S = 10.0


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PlayedNodes]]:
    """The nodes of all clusters that are launched, which are played here."""
    made: list[PlayedNodes] = []

    class Known(Ending):
        def __init__(self, cluster_id: str, executor: Any) -> None:
            super().__init__(cluster_id, executor)
            executor.ending = self
            made.append(executor)

    monkeypatch.setattr(launching, "Ending", Known)
    yield made


def start(mode: InputMode = InputMode.TENSORFLOW) -> sparkdl.Cluster:
    spec = ClusterSpec("played", plan_nodes(2), "plain", mode, settings=Settings(hang_timeout_s=None))
    cluster: sparkdl.Cluster = launching._start(
        spec, PlayedNodes(), Environment(), b"", print, False
    )
    return cluster


def ends(nodes: PlayedNodes, within_s: float = SOON_S) -> bool:
    """Wait until nothing is left of a cluster."""
    assert nodes.ending
    nodes.ending._changed.wait_for(lambda: nodes.ending.is_over, Deadline.after(within_s))
    return nodes.ending.is_over and nodes.closed.is_set()


def places(pairs: bool) -> Iterator[Interrupts]:
    """Yield an interrupt for each place, until none gets that far; two with `pairs`."""
    first, second = 1, int(pairs)
    while True:
        interrupts = Interrupts(first, second)
        yield interrupts
        if interrupts.are_over:
            ...


def call_aside(call: Callable[[], Any]) -> Any:
    """Call in another thread, for which no lock of this one may be left behind."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(SOON_S)
