"""Rows cross the network encrypted, and only between those that believe each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pytest

from sparkdl.control.descriptors import FdSender
from sparkdl.control.tls import Tls, Trust, new_tls
from sparkdl.feed.transfer.feeder import Feeder
from sparkdl.feed.transfer.messages import FeederError, FeedSpec
from tests.doubles.feeds import NodeProxy, numbers, order
from tests.doubles.spools import SpoolServer

ROWS = list(range(1000))


@pytest.fixture(scope="module")
def ours() -> Tls:
    return new_tls()


@pytest.fixture
def _far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Feeders are on another machine: no descriptor is handed over."""
    monkeypatch.setattr(FdSender, "connect", lambda name, token: None)


def told(spec: FeedSpec, trust: Trust | None) -> FeedSpec:
    return replace(spec, trust=trust)


def batches() -> Iterator[pa.RecordBatch]:
    return iter([numbers(0, 400, 8), numbers(400, 1000, 8)])


@pytest.mark.usefixtures("_far")
@pytest.mark.parametrize("is_encrypted", [True, False])
def test_rows_and_token_cross_in_the_clear_only_without_tls(is_encrypted: bool, ours: Tls) -> None:
    tls = ours if is_encrypted else None
    secrets = (b"Bearer secret", numbers(0, 400)["x"].buffers()[1].to_pybytes()[: 8 * 100])
    with SpoolServer(tls=tls) as node, NodeProxy(node.target, records=True) as network:
        assert node.target.uri.startswith("grpc+tls://" if tls else "grpc://")
        spec = told(order([network.target]), tls.trust if tls else None)
        Feeder(spec, 0).feed(batches())
        assert node.values == ROWS
        assert len(network.passed) > 8 * 8 * len(ROWS)
        assert [secret in network.passed for secret in secrets] == [not is_encrypted] * 2


@pytest.mark.usefixtures("_far")
@pytest.mark.parametrize(
    ("server", "client", "reason"),
    [
        ("ours", "another", "certificate verify failed"),
        ("ours", "none", "."),
        ("none", "ours", "."),
    ],
)
def test_who_is_not_believed_gets_no_row_and_is_told_soon(
    server: str, client: str, reason: str, ours: Tls
) -> None:
    known = {
        "ours": ours.trust,
        "another": new_tls().trust,
        "none": None,
    }
    with SpoolServer(tls=ours if server == "ours" else None) as node:
        scheme = "grpc" if client == "none" else "grpc+tls"
        target = replace(node.target, uri=f"{scheme}://127.0.0.1:{node.port}")
        feeder = Feeder(told(order([target]), known[client]), 0)
        with pytest.raises(FeederError, match=reason):
            feeder.feed(batches())
        assert feeder.unreachable == target
        assert node.seen == []
        Feeder(told(order([node.target]), known[server]), 0).feed(batches())
        assert node.values == ROWS, "and nobody else is disturbed"
