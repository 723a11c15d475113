"""The Flight server of a node: who may call it, and what a bad caller does to the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from sparkdl.control.auth import bearer
from sparkdl.control.messages import FeedCut
from sparkdl.feed.transfer.messages import FetchTicket, PutAck, PutHeader, PutPiece
from tests.doubles.feeds import FEED, SOON_S, TOKEN, LocalNode, NodeProxy, numbers, values

BATCH = numbers(0, 10)
OPTIONS = flight.FlightCallOptions(
    timeout=SOON_S, headers=[(b"authorization", bearer(TOKEN).encode())]
)


class Put:
    def __init__(
        self, client: flight.FlightClient, partition: int = 0, header: bytes | None = None
    ) -> None:
        header = header or msgspec.json.encode(PutHeader(FEED, 0, "run", partition))
        self.writer, self.reader = client.do_put(
            flight.FlightDescriptor.for_command(header), BATCH.schema, OPTIONS
        )

    def send(self, batch: pa.RecordBatch, start_row: int) -> None:
        self.writer.write_with_metadata(
            batch, msgspec.json.encode(PutPiece(((start_row, start_row + batch.num_rows),)))
        )

    def acknowledged(self) -> PutAck:
        data = self.reader.read()
        assert data is not None
        ack = msgspec.json.decode(data.to_pybytes(), type=PutAck)
        return msgspec.structs.replace(ack, fd_socket="")


@contextmanager
def client_of(node: LocalNode) -> Iterator[flight.FlightClient]:
    with flight.connect(node.uri) as client:
        yield client


def feed(node: LocalNode, partition: int = 9) -> None:
    """Do what a good feeder does."""
    with client_of(node) as client:
        put = Put(client, partition)
        assert put.acknowledged() == PutAck(False)
        put.send(numbers(0, 20), 0)
        assert put.acknowledged() == PutAck(False)
        put.writer.close()


def ticket(skip: int, rows: int, generation: int = 0) -> flight.Ticket:
    return flight.Ticket(msgspec.json.encode(FetchTicket(FEED, generation, 1, ((0, skip, rows),))))


def get(client: flight.FlightClient, skip: int, rows: int, generation: int = 0) -> list[int]:
    """Do what an agent does that fetches rows."""
    reader = client.do_get(ticket(skip, rows, generation), OPTIONS)
    batch = reader.read_chunk().data  # not `read_all`: Arrow's pipe for signals would stay
    with pytest.raises(StopIteration):
        reader.read_chunk()
    return [int(x) for x in batch.column("x").to_pylist()]


def test_agent_of_another_generation_is_asked_to_come_again() -> None:
    with LocalNode() as node, client_of(node) as client:
        feed(node)
        with pytest.raises(flight.FlightUnavailableError, match="another generation"):
            get(client, 0, 1, generation=1)


def test_child_that_has_returned_leaves_a_node_that_spools_for_others() -> None:
    with LocalNode() as node, client_of(node) as client:
        node.driver = None
        node.call(lambda: node.feeds.close("map_fun has returned"))
        feed(node)
        assert get(client, 0, 20) == list(range(20))


def test_epoch_that_was_cut_is_refused() -> None:
    with LocalNode() as node, client_of(node) as client:
        put = Put(client)
        put.acknowledged()
        node.call(lambda: node.feeds.on_driver_message(FeedCut(FEED, 0)))
        put.send(BATCH, 0)
        assert put.acknowledged() == PutAck(True)
        put.writer.close()
        another = Put(client)
        assert another.acknowledged() == PutAck(True)
        another.writer.close()


@pytest.mark.parametrize(
    "headers",
    [[], [(b"authorization", b"Bearer wrong")], [(b"authorization", TOKEN.encode())]],
    ids=["missing", "wrong", "not a bearer"],
)
@pytest.mark.parametrize("call", ["put", "exchange", "get"])
def test_call_without_token_reaches_nothing(headers: list[tuple[bytes, bytes]], call: str) -> None:
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
                client.do_get(ticket(0, 1), options).read_all()
        assert node.feeds.store.logs == ()


def test_peer_that_stalls_disturbs_nobody_and_is_not_waited_for() -> None:
    with LocalNode() as node, NodeProxy(node.target) as proxy:
        client = flight.connect(proxy.target.uri)
        put = Put(client)
        put.acknowledged()
        put.send(BATCH, 0)
        put.acknowledged()
        feed(node)
        node.wait_received(30)
        node.end_epoch(0, {0: 30})
        assert sorted(values(node.reader())) == sorted([*range(10), *range(20)])
        node.call(node.feeds.shut_down)
        assert node.feeds.store.log(FEED).is_closed
        assert not any("(shutdown)" in thread.name for thread in threading.enumerate())
        with pytest.raises(flight.FlightError):
            put.writer.close()
        client.close()
