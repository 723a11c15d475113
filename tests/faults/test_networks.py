"""A connection is cut or breaks: nobody else is blamed, and no row is lost."""

from __future__ import annotations

import logging
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from sparkdl.control.messages import Assign
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import NodeLostError
from sparkdl.core.options import Recovery
from sparkdl.driver.lifecycle.state import Running
from sparkdl.driver.view import ClusterView
from sparkdl.node.context import NodeContext
from sparkdl.node.spec import start_agent
from tests.doubles.ledger import Plan, lost_and_doubled, table, train
from tests.doubles.nodes import SOON_S, launch, processes, use_settings
from tests.doubles.proxy import Proxy

ROWS = 400


@dataclass
class Network:
    """The network between the driver and the agent of one node."""

    proxies: list[Proxy]

    def cut(self) -> None:
        for proxy in self.proxies:
            proxy.stall()

    def mend(self) -> None:
        for proxy in self.proxies:
            proxy.mend()


@pytest.fixture
def network_of_node_1(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    """The network of node 1 of local clusters, whose lease is a second."""
    use_settings(monkeypatch, lease_s=1.0)
    network = Network([])

    def start(order: Any, *rest: Any) -> Any:
        if order.node_id == 1:
            network.proxies.append(stack.enter_context(Proxy(order.url)))
            order = msgspec.structs.replace(order, url=network.proxies[-1].uri)
        return start_agent(order, *rest)

    monkeypatch.setattr("sparkdl.driver.executors.local.start_agent", start)
    with ExitStack() as stack:
        yield network


def _has_lost_a_node(view: ClusterView) -> bool:
    return not isinstance(view.state, Running)


def hang_at_first(args: None, ctx: NodeContext) -> int:
    if ctx.generation == 0:
        signal.pause()
    return ctx.generation


def test_cut_within_the_lease_harms_nobody_and_a_longer_one_ends_the_child_before_its_node_is_lost(
    network_of_node_1: Network,
) -> None:
    """Two children for one node never train.

    The agent cannot ask anybody, and ends its child; the driver cannot know, and waits for longer.
    """
    with (
        pytest.raises(NodeLostError, match=r"worker:1 \(rank 1") as caught,
        launch(hang_at_first) as cluster,
    ):
        child = psutil.Process(processes()["worker:1"].child.pid)
        gone_s: list[float] = []

        def watch() -> None:
            child.wait(2 * SOON_S)
            gone_s.append(time.monotonic())

        watcher = threading.Thread(target=watch)
        watcher.start()
        network_of_node_1.cut()
        assert not cluster._controller.wait_for(_has_lost_a_node, Deadline.after(0.9))
        network_of_node_1.mend()
        assert not cluster._controller.wait_for(_has_lost_a_node, Deadline.after(1.0))
        assert isinstance(cluster._controller.view.state, Running)
        assert child.is_running()
        network_of_node_1.cut()
        has_lost = cluster._controller.wait_for(_has_lost_a_node, Deadline.after(2 * SOON_S))
        lost_s = time.monotonic()
        watcher.join()
        assert has_lost
        assert gone_s[0] < lost_s
        cluster.wait(SOON_S)
    assert "no data for" in caught.value.root_cause.message


def test_node_that_cannot_fetch_is_the_cause_and_the_restart_loses_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver reaches an agent that does not answer another one, which fetches its rows."""
    use_settings(monkeypatch, lease_s=1.0)
    caplog.set_level(logging.WARNING)
    links, stack = list[Proxy](), ExitStack()

    def assign(*about: Any, **more: Any) -> Assign:
        uris: dict[int, str] = more.get("uris", {})
        if uris and not links:
            links.append(stack.enter_context(Proxy(next(iter(uris.values())))))
            links[0].stall()
        if uris and "restart 1 of 1" not in caplog.text:
            more["uris"] = dict.fromkeys(uris, links[0].uri)
        return Assign(*about, **more)

    monkeypatch.setattr("sparkdl.driver.feeds.transitions.Assign", assign)
    options: dict[str, Any] = {"recovery": Recovery(host_timeout_s=4.0), "max_restarts": 1}
    with launch(train, Plan(), checkpoint_dir=str(tmp_path), **options) as cluster, stack:
        cluster.feed(table(ROWS), timeout_s=3 * SOON_S)
        results = cluster.results(3 * SOON_S)
        assert cluster.world.generation == 1
    cause = r"restart 1 of 1 because worker:(\d) .* cannot fetch rows from worker:(?!\1)\d: no an"
    assert re.search(cause, caplog.text)
    assert lost_and_doubled(results, ROWS) == (0, 0)
