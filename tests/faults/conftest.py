"""What the chaos suite shares: clusters in which something goes wrong, and what is left of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import psutil
import pytest

from sparkdl.node.spec import start_agent
from tests.doubles.nodes import use_settings
from tests.doubles.proxy import Proxy


@pytest.fixture(autouse=True)
def _restarts_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    use_settings(monkeypatch)


@dataclass
class Network:
    """The network between the driver and the agent of one node."""

    patch: pytest.MonkeyPatch
    proxies: list[Proxy]

    def lease(self, lease_s: float) -> None:
        """Have clusters use this lease."""
        use_settings(self.patch, lease_s=lease_s)

    def cut(self) -> None:
        for proxy in self.proxies:
            proxy.stall()

    def mend(self) -> None:
        for proxy in self.proxies:
            proxy.mend()


@dataclass(frozen=True)
class SparkProcesses:
    """What Spark runs on the machine of a node, by the node's agent.

    Attributes:
        task: the Python worker in which the agent's task runs.
        executor: a JVM.
        worker: of the standalone cluster, a JVM.
    """

    task: psutil.Process
    executor: psutil.Process
    worker: psutil.Process

    @classmethod
    def of(cls, agent: psutil.Process) -> SparkProcesses:
        task, *parents = agent.parents()
        executor, worker = (
            next(p for p in parents if f".{name}" in " ".join(p.cmdline()))
            for name in ("CoarseGrainedExecutorBackend", "worker.Worker")
        )
        return cls(task, executor, worker)


@pytest.fixture
def network_of_node_1(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    """The network of node 1 of local clusters; each of its agents has a connection of its own."""
    network = Network(monkeypatch, [])

    def start(order: Any, *rest: Any) -> Any:
        if order.node_id == 1:
            network.proxies.append(stack.enter_context(Proxy(order.url)))
            order = msgspec.structs.replace(order, url=network.proxies[-1].uri)
        return start_agent(order, *rest)

    monkeypatch.setattr("sparkdl.driver.executors.local.start_agent", start)
    with ExitStack() as stack:
        yield network
