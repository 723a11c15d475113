"""Whole clusters with TLS: trained, scored, asked, and what a listener on the wire gets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from sparkdl.control.auth import fetch_cause
from sparkdl.control.descriptors import FdSender
from sparkdl.control.tls import new_tls
from sparkdl.core.errors import LaunchError
from sparkdl.core.options import Startup
from sparkdl.driver.options import Observe
from sparkdl.node.context import NodeContext
from sparkdl.node.spec import AgentSpec, start_agent
from tests.doubles.nodes import SOON_S, Lines, launch
from tests.doubles.proxy import Proxy

ROW, RESULT, PRINTED = "row-that-nobody-else-reads", "its-result", "what-a-node-prints"


class Wire:
    """All that the cluster's processes send to one another, recorded on its way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> None:
        self._stack = stack
        self._proxies: dict[str, Proxy] = {}
        connect = flight.connect

        def start(order: AgentSpec, *rest: Any) -> Any:
            return start_agent(msgspec.structs.replace(order, url=self.tapped(order.url)), *rest)

        monkeypatch.setattr("sparkdl.driver.executors.local.start_agent", start)
        monkeypatch.setattr(
            flight, "connect", lambda uri, **options: connect(self.tapped(uri), **options)
        )
        # As on different machines: on one, segments are handed over without a network.
        monkeypatch.setattr(FdSender, "connect", lambda name, token: None)

    def tapped(self, uri: str) -> str:
        """Return where the same server is found through a listener."""
        address = urlsplit(uri).netloc
        if address not in self._proxies:
            proxy = Proxy(uri, records=True)
            self._proxies[address] = self._stack.enter_context(proxy)
        return self._proxies[address].uri

    def servers_of(self, text: str) -> int:
        """To or from how many servers it has gone in the clear."""
        return sum(text.encode() in proxy.passed for proxy in self._proxies.values())

    @property
    def num_servers(self) -> int:
        """How many servers somebody has sent anything to."""
        return sum(bool(proxy.passed) for proxy in self._proxies.values())


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    with ExitStack() as stack:
        yield Wire(monkeypatch, stack)


def train_and_score(args: Any, ctx: NodeContext) -> int:
    print(PRINTED, flush=True)
    rows = sum(len(batch["text"]) for batch in ctx.batches(10))
    feed = ctx.get_data_feed(False, qname_in="score")
    while not feed.should_stop():
        feed.batch_results([f"{RESULT} {row}" for row in feed.next_batch(100)])
    return rows


@pytest.mark.parametrize("is_on", [False, True])
def test_cluster_trains_scores_and_answers_and_a_listener_learns_of_it_only_without_tls(
    is_on: bool, wire: Wire
) -> None:
    lines = Lines()
    table = pa.table({"text": [f"{ROW} {i}" for i in range(1000)]})
    with launch(
        train_and_score, nodes=1, observe=Observe(on_log=lines), startup=Startup(tls=is_on)
    ) as cluster:
        assert cluster.feed([table.slice(0, 500), table.slice(500)]).rows_used == 1000
        results = list(cluster.infer(["a", "b", "c"], "score"))
        assert results == [f"{RESULT} {row}" for row in "abc"]
        lines.wait_for(PRINTED)
        assert all("train_and_score" in stack for stack in cluster.stacks().values())
        assert PRINTED in cluster.logs(0)
        spec = cluster._feeds.feed_spec("input", None)
        assert spec.token not in repr(spec)
        assert fetch_cause(wire.tapped(spec.coordinator), spec.token, spec.trust) == ""
        assert cluster.results(SOON_S) == [1000]
    assert wire.num_servers == 2, "the coordinator and a node"
    secrets = {ROW: 1, RESULT: 1, "FeedBegin": 1, spec.token: 2}
    in_the_clear = {secret: wire.servers_of(secret) for secret in secrets}
    assert in_the_clear == (dict.fromkeys(secrets, 0) if is_on else secrets)


def test_agent_that_meets_another_coordinator_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(order: AgentSpec, *rest: Any) -> Any:
        return start_agent(msgspec.structs.replace(order, tls=new_tls()), *rest)

    monkeypatch.setattr("sparkdl.driver.executors.local.start_agent", start)
    with pytest.raises(LaunchError, match="is not this cluster's coordinator"):
        launch(train_and_score, nodes=1, startup=Startup(tls=True))
