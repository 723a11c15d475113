"""No header, piece or batch makes a node's Flight server fall over, and it is fed afterwards."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from sparkdl.control.messages import SpooledRange
from sparkdl.core.errors import ProtocolError, SparkdlError
from sparkdl.feed.store.segment import StoredSegment
from sparkdl.feed.store.store import NodeStore, StoreLimits
from sparkdl.feed.transfer import messages, server as server_module
from sparkdl.feed.transfer.feeder import Feeder
from sparkdl.feed.transfer.messages import FetchTicket, PutHeader, PutPiece
from sparkdl.feed.transfer.server import FlightServer
from tests.doubles.feeds import SOON_S, TOKEN, numbers, order
from tests.fuzz.inputs import SEED, altered, damaged, share

BATCH = numbers(0, 10)
WORDS = pa.record_batch({"s": ["a", None, "ccc"], "l": [[1], [], [2, 3]]})
PUT = [
    msgspec.json.encode(PutHeader("input", 0, "run", 0)),
    msgspec.json.encode(PutHeader("other", 3, "run", 2, 5, keep=True)),
    msgspec.json.encode(PutHeader("input", 0, "run", 0, generation=7)),
]
PIECES = [
    msgspec.json.encode(PutPiece(((0, 10),))),
    msgspec.json.encode(PutPiece(((10, 12), (15, 23)))),
    msgspec.json.encode(PutPiece(((0, 10),), 10, "key-1")),
]
TICKETS = [
    msgspec.json.encode(FetchTicket("input", 0, 1 << 20, ((0, 0, 10),))),
    msgspec.json.encode(FetchTicket("input", 0, 10, ((0, 3, 5), (0, 8, 1)))),
    msgspec.json.encode(FetchTicket("input", 7, 1, ())),
]
EXCHANGES = [
    msgspec.json.encode(messages.ExchangeHeader("input", "0.a", 1.0)),
    msgspec.json.encode(messages.ExchangeHeader("input", "0.b")),
]


@dataclass
class Chunk:
    """What a stream brings at once."""

    data: pa.RecordBatch | None
    app_metadata: bytes | None = None


@dataclass
class Call:
    """The rest of what gRPC gives to a handler."""

    command: bytes = b""
    ticket: bytes = b""
    written: list[Any] = field(default_factory=list)

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def begin(self, schema: pa.Schema) -> None:
        pass

    def write(self, data: Any) -> None:
        self.written.append(data)

    write_batch = write


class Node:
    """A store that a child reads at once, and its server."""

    def __init__(self) -> None:
        self.rows: Counter[str] = Counter()
        self.store = NodeStore(
            StoreLimits(1 << 28), SOON_S, self._on_segment, self._on_spooled, lambda _: None
        )
        self.server = FlightServer("127.0.0.1", TOKEN, self.store)
        self._numbers: list[tuple[str, int]] = []
        self._ranges: list[tuple[str, SpooledRange]] = []

    def _on_segment(self, segment: StoredSegment, fd: int) -> None:
        os.close(fd)
        self._numbers.append((segment.feed, segment.number))
        self.rows[segment.feed] += segment.rows
        exchange = self.store.exchange(segment.exchange) if segment.exchange else None
        if exchange is not None and segment.rows:
            exchange.add(b"", segment.rows)

    def _on_spooled(self, feed: str, epoch: int, ranges: list[SpooledRange]) -> None:
        self._ranges += [(feed, piece) for piece in ranges]

    def settle(self) -> None:
        for feed, piece in self._ranges:
            self.store.spool(feed).free(piece.number, piece.skip, piece.rows)
        self._ranges.clear()
        for feed, number in self._numbers:
            self.store.log(feed).release([number])
        self._numbers.clear()
        if len(self.store.logs) > 1000:
            self.store.reopen(0)

    def check_works(self) -> None:
        """A good feeder feeds."""
        target = messages.Target(0, "worker:0", self.server.uri)
        for partition in (0, 1):
            fed = Feeder(order([target], run="good"), partition).feed(iter([numbers(0, 50)]))
            assert fed.num_rows == 50
        self.settle()
        assert self.store.budget.used_nbytes == 0
        assert not self.store.is_answering


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    node = Node()
    monkeypatch.setattr(server_module, "_FD_WAIT_S", 0.0)
    yield node
    monkeypatch.setattr(server_module, "_FD_WAIT_S", SOON_S)
    try:
        node.check_works()
    finally:
        node.store.shut_down("the end")
        node.server.shutdown()


@contextmanager
def refused_if_bad(data: object, *errors: type[Exception]) -> Iterator[None]:
    """What is raised must be one of sparkdl's errors, or one of Flight's."""
    try:
        yield
    except (SparkdlError, flight.FlightError, *errors):
        pass
    except Exception as error:
        raise AssertionError(f"FUZZ_SEED={SEED}: {data!r}") from error


def ipc_stream(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as out:
        out.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def broken() -> Iterator[pa.RecordBatch]:
    """Yield batches as they come out of damaged Arrow streams, so far as Arrow lets them out."""
    for data in damaged([ipc_stream(BATCH), ipc_stream(WORDS)], 1 << 40, "Arrow"):
        with suppress(pa.ArrowException, OSError, StopIteration, UnicodeError):
            yield pa.ipc.open_stream(data).read_next_batch()


def test_any_header_and_pieces_are_taken_or_refused(node: Node) -> None:
    count = share(0.04)
    pieces, batches = altered(PIECES, 2 * count, "piece"), broken()
    for header in altered(PUT, count, "put"):
        metadata = [next(pieces), next(pieces)]
        chunks = [Chunk(next(batches), each or None) for each in metadata]
        with refused_if_bad((header, metadata)):
            node.server.do_put(Call(), Call(header), chunks, Call())
        node.settle()


def test_any_ticket_is_answered_or_refused(node: Node) -> None:
    node.server.do_put(Call(), Call(PUT[0]), [Chunk(BATCH, PIECES[0])], Call())
    for ticket in altered(TICKETS, share(0.04), "ticket"):
        with refused_if_bad(ticket):
            node.server.do_get(Call(), Call(ticket=ticket))
    node.settle()


def test_any_exchange_is_answered_or_refused(node: Node) -> None:
    count = share(0.01)
    batches = broken()
    for number, header in enumerate(altered(EXCHANGES, count, "exchange")):
        chunks = [Chunk(BATCH), Chunk(next(batches)), Chunk(None)][: number % 3 + 1]
        with refused_if_bad(header):
            node.server.do_exchange(Call(), Call(header), chunks, Call())
        node.settle()
        assert not node.store.is_answering


def test_batch_whose_offsets_lead_beyond_its_bytes_is_refused(node: Node) -> None:
    good, bad = (np.array(ends, np.int32).tobytes() for ends in ([0, 71, 713], [0, 71, 1 << 30]))
    stream = ipc_stream(pa.record_batch({"s": ["a" * 71, "b" * 642]}))
    assert good in stream
    batch = pa.ipc.open_stream(stream.replace(good, bad)).read_next_batch()
    chunk = Chunk(batch, PIECES[0])
    with pytest.raises(ProtocolError, match="a broken record batch"):
        node.server.do_put(Call(), Call(PUT[0]), [chunk], Call())
    with pytest.raises(flight.FlightServerError, match="a broken record batch"):
        node.server.do_exchange(Call(), Call(EXCHANGES[0]), [chunk], Call())
