"""The Flight server of a node: who may call it, and what a bad caller does to the others."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from sparkdl.control.auth import bearer
from sparkdl.feed.transfer.feeder import Feeder
from sparkdl.feed.transfer.messages import PutAck, PutHeader, PutPiece
from tests.doubles.feeds import FEED, SOON_S, TOKEN, LocalNode, NodeProxy, numbers, order, values

BATCH = numbers(0, 10)


class Put:
    """A `DoPut`, step by step."""

    def __init__(self, client: flight.FlightClient, header: bytes | None = None, **of: Any) -> None:
        header = header or msgspec.json.encode(PutHeader(FEED, 0, "run", 0, **of))
        options = flight.FlightCallOptions(
            timeout=SOON_S, headers=[(b"authorization", bearer(TOKEN).encode())]
        )
        self.writer, self.reader = client.do_put(
            flight.FlightDescriptor.for_command(header), BATCH.schema, options
        )

    def send(self, batch: pa.RecordBatch, start_row: int) -> None:
        self.writer.write_with_metadata(batch, msgspec.json.encode(PutPiece(start_row)))

    def acknowledged(self) -> PutAck:
        data = self.reader.read()
        assert data is not None
        ack = msgspec.json.decode(data.to_pybytes(), type=PutAck)
        return msgspec.structs.replace(ack, fd_socket="")


@contextmanager
def client_of(node: LocalNode) -> Iterator[flight.FlightClient]:
    with flight.connect(node.uri) as client:
        yield client


def feed(node: LocalNode, rows: int = 20, partition: int = 9) -> None:
    fed = Feeder(order([node.target]), partition).feed(iter([numbers(0, rows)]))
    assert fed.rows == {node.node_id: rows}


def test_each_batch_is_acknowledged_and_a_later_attempt_is_told_of_it() -> None:
    with LocalNode() as node, client_of(node) as client:
        put = Put(client)
        assert put.acknowledged() == PutAck(True, False)
        put.send(BATCH, 0)
        assert put.acknowledged() == PutAck(True, False)
        feed(node)
        put.send(BATCH, 10)
        assert put.acknowledged() == PutAck(True, False)
        put.writer.close()
        another = Put(client, attempt=1)
        assert another.acknowledged() == PutAck(True, False, ((0, 20),))
        another.writer.close()


def test_closed_node_says_so_and_refuses() -> None:
    with LocalNode() as node, client_of(node) as client:
        put = Put(client)
        put.acknowledged()
        node.call(lambda: node.feeds.close("map_fun has returned"))
        put.send(BATCH, 0)
        assert put.acknowledged() == PutAck(False, True)
        put.writer.close()
        another = Put(client)
        assert another.acknowledged() == PutAck(True, True)
        another.writer.close()


def test_earlier_attempt_is_refused_once_a_later_one_has_begun() -> None:
    with LocalNode() as node, client_of(node) as client:
        early = Put(client, attempt=1)
        early.acknowledged()
        late = Put(client, attempt=2)
        late.acknowledged()
        early.send(BATCH, 0)
        with pytest.raises(flight.FlightError, match=r"attempt 1 at partition 0 .* is out of date"):
            early.writer.close()
        late.send(BATCH, 0)
        assert late.acknowledged().accepted
        late.writer.close()
        assert node.rows_received == 10


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"Bearer wrong")],
        [(b"authorization", TOKEN.encode())],
        [(b"authorization", b"")],
    ],
    ids=["missing", "wrong", "not a bearer", "empty"],
)
@pytest.mark.parametrize("call", ["put", "exchange", "action"])
def test_call_without_the_token_never_reaches_a_handler(
    headers: list[tuple[bytes, bytes]], call: str
) -> None:
    with LocalNode() as node, client_of(node) as client:
        options = flight.FlightCallOptions(timeout=SOON_S, headers=headers)
        header = msgspec.json.encode(PutHeader(FEED, 0, "run", 0))
        descriptor = flight.FlightDescriptor.for_command(header)
        with pytest.raises(flight.FlightUnauthenticatedError, match="wrong or missing token"):
            if call == "put":
                writer, reader = client.do_put(descriptor, BATCH.schema, options)
                reader.read()
                writer.close()
            elif call == "exchange":
                writer, reader = client.do_exchange(descriptor, options)
                reader.read_chunk()
            else:
                list(client.do_action("anything", options))
        assert node.feeds.store.logs == ()


@pytest.mark.parametrize("header", [b" ", b"junk", b'{"feed": 1}', b"\x80\x04K\x01."])
def test_header_that_is_none_is_an_error_for_its_caller_alone(header: bytes) -> None:
    with LocalNode() as node, client_of(node) as client:
        with pytest.raises(pa.ArrowException, match=r"not a PutHeader: .*(JSON|str|truncated)"):
            Put(client, header).writer.close()
        feed(node)


@pytest.mark.parametrize(
    "junk",
    [
        b"\x00" * 4096,
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 512,
    ],
    ids=["zeros", "HTTP/1", "HTTP/2 and noise"],
)
def test_junk_on_the_port_disturbs_nobody(junk: bytes) -> None:
    with LocalNode() as node:
        host, _, port = node.uri.rpartition("//")[2].rpartition(":")
        with socket.create_connection((host, int(port)), SOON_S) as bad:
            bad.sendall(junk)
            feed(node)
        feed(node, partition=10)


def test_peer_that_stalls_disturbs_nobody_and_is_not_waited_for() -> None:
    with LocalNode() as node, NodeProxy(node.target) as proxy:
        client = flight.connect(proxy.target.uri)
        put = Put(client)
        put.acknowledged()
        put.send(BATCH, 0)
        put.acknowledged()
        feed(node)
        node.end_epoch(0, {0: 30})
        assert sorted(values(node.reader())) == sorted([*range(10), *range(20)])
        node.call(node.feeds.shut_down)
        assert node.feeds.store.log(FEED).is_closed
        assert not any("(shutdown)" in thread.name for thread in threading.enumerate())
        with pytest.raises(flight.FlightError):
            put.writer.close()
        client.close()
