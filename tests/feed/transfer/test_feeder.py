"""A partition's rows reach the spool of one agent, whatever happens to it."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from hypothesis import given, strategies as st

from sparkdl.control.descriptors import FdReceiver, FdSender
from sparkdl.control.tls import Tls, new_tls
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, FeedTimeoutError
from sparkdl.core.row_ranges import Range, merge_ranges
from sparkdl.feed.store.segment import read_segment
from sparkdl.feed.transfer import feeder, messages
from sparkdl.feed.transfer.feeder import FED_SCHEMA, FeedDataFrame, Feeder, near_target
from sparkdl.feed.transfer.messages import FedPartition, FeederError, PutHeader, PutPiece, Target
from sparkdl.feed.transfer.server import _TokenCheck
from tests.control.rooms import TOKEN as ROOMS_TOKEN, room
from tests.doubles.feeds import FEED, SOON_S, TOKEN, NodeProxy, Running, numbers, order

Answer = Literal["store", "close", "store and close", "fail", "say nothing", "babble"]


@dataclass(frozen=True)
class Spooled:
    """A piece that was stored: rows of a partition, and how they came."""

    header: PutHeader
    ranges: tuple[Range, ...]
    batch: pa.RecordBatch
    is_descriptor: bool

    @property
    def rows(self) -> list[int]:
        return [row for start, stop in self.ranges for row in range(start, stop)]


class SpoolServer(flight.FlightServerBase):  # type: ignore[misc]
    """The agent of one node that only spools: it stores what feeders bring, or does not.

    Args:
        answer: says what becomes of a piece; called with the message beside it.
        opening: what becomes of a call, as its first answer says.

    Attributes:
        spooled: what is stored.
        seen: the first row's number of each piece that came, whatever became of it.
        digests: of each piece.
    """

    def __init__(
        self,
        node_id: int = 0,
        answer: Callable[[PutPiece], Answer] = lambda _: "store",
        opening: Answer = "store",
        token: str = TOKEN,
        tls: Tls | None = None,
    ) -> None:
        scheme = "grpc+tls" if tls else "grpc"
        super().__init__(
            f"{scheme}://127.0.0.1:0",
            middleware={"token": _TokenCheck(token)},
            **(tls.flight_options() if tls else {}),
        )
        self.answer = answer
        self.spooled: list[Spooled] = []
        self.seen: list[int] = []
        self.digests: list[Any] = []
        self.target = Target(node_id, f"worker:{node_id}", f"{scheme}://127.0.0.1:{self.port}")
        self._opening = opening
        self._changed = threading.Condition()
        self._is_over = threading.Event()
        self._fds = FdReceiver(token)

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._fds.close()
        super().__exit__(*error)

    @property
    def values(self) -> list[int]:
        """Column "x" of all stored rows, in the order in which they came."""
        return [value for each in self.spooled for value in each.batch["x"].to_pylist()]

    def wait_seen(self, pieces: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.seen) >= pieces, SOON_S), self.seen

    def do_put(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        header = msgspec.json.decode(descriptor.command, type=PutHeader)
        self._acknowledge(writer, self._opening, self._fds.name)
        for chunk in reader:
            piece = msgspec.json.decode(chunk.app_metadata.to_pybytes(), type=PutPiece)
            with self._changed:
                self.seen.append(piece.ranges[0][0])
                self.digests.append(piece.digest)
                self._changed.notify_all()
            answer = self.answer(piece)
            if answer in ("store", "store and close"):
                batch = self._descriptor(piece.key) if piece.key else chunk.data
                assert batch.num_rows == piece.rows
                self.spooled.append(Spooled(header, piece.ranges, batch, bool(piece.key)))
            self._acknowledge(writer, answer)

    def _acknowledge(
        self, writer: flight.FlightMetadataWriter, answer: Answer, fd_socket: str = ""
    ) -> None:
        if answer == "fail":
            raise flight.FlightServerError("the spool is on fire")
        if answer == "say nothing":
            self._is_over.wait(SOON_S)
        ack = messages.PutAck("close" in answer, fd_socket)
        writer.write(b"babble" if answer == "babble" else msgspec.json.encode(ack))

    def _descriptor(self, key: str) -> pa.RecordBatch:
        fd = self._fds.wait_fd(key, Deadline.after(SOON_S))
        try:
            return read_segment(fd)
        finally:
            os.close(fd)


def batches(rows: int, size: int, width: int = 1) -> Iterator[pa.RecordBatch]:
    for start in range(0, rows, size):
        yield numbers(start, min(rows, start + size), width)


def then(
    source: Iterator[pa.RecordBatch], at: int, do: Callable[[], object]
) -> Iterator[pa.RecordBatch]:
    """Yield what `source` does, and do something before batch `at`."""
    for number, batch in enumerate(source):
        if number == at:
            do()
        yield batch


def answers(*script: Answer, default: Answer = "store") -> Callable[[PutPiece], Answer]:
    """Return what answers one piece after the other by a script."""
    left = iter(script)
    return lambda _: next(left, default)


def test_partition_goes_to_an_agent_of_its_host_or_to_one_by_its_number() -> None:
    nodes = [Target(n, f"worker:{n}", f"grpc://10.0.0.{n // 2}:80") for n in range(6)]
    # Three hosts: each third partition is on this one, if all have as many.
    here = [near_target(nodes, p, lambda host: host == "10.0.0.1") for p in range(0, 12, 3)]
    assert [target.node_id for target in here] == [2, 3, 2, 3]
    away = [near_target(nodes, p, lambda _: False) for p in range(8)]
    assert [target.node_id for target in away] == [*range(6), 0, 1]


def test_addresses_of_this_host_are_known_by_binding_them() -> None:
    away = Target(0, "worker:0", "grpc://192.0.2.1:80")
    for host in ("127.0.0.1", "[::1]"):
        near = Target(1, "worker:1", f"grpc://{host}:80")
        assert near_target([away, near], 0) == near


@pytest.mark.parametrize("is_near", [True, False])
def test_rows_are_stored_once_each_in_order(is_near: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As descriptors on the agent's own machine, through Flight from another one."""
    if not is_near:
        monkeypatch.setattr(FdSender, "connect", lambda name, token: None)
    with SpoolServer() as node:
        spec = replace(order([node.target]), generation=3, keep=True)
        assert Feeder(spec, 4).feed(batches(1001, 100)) == FedPartition(4, 1001)
        assert node.values == list(range(1001))
        assert [piece.rows[0] for piece in node.spooled] == list(range(0, 1001, 100))
        assert {piece.is_descriptor for piece in node.spooled} == {is_near}
        header = PutHeader(FEED, 0, "run", 4, 3, keep=True)
        assert {piece.header for piece in node.spooled} == {header}


def test_small_batches_are_joined_and_large_ones_halved() -> None:
    small, large = (numbers(n * 1000, n * 1000 + 1000, width) for n, width in ((0, 1), (3, 4000)))
    source = [small, numbers(1000, 2000), numbers(2000, 3000), large]
    with SpoolServer() as node:
        fed = Feeder(replace(order([node.target]), min_piece_nbytes=4 << 20), 0).feed(iter(source))
        assert fed.num_rows == 4000
        sizes = [piece.batch.nbytes for piece in node.spooled]
        assert [piece.rows[0] for piece in node.spooled] == [0, 3000, 3250, 3500, 3750]
        assert max(sizes) <= feeder.MAX_PIECE_NBYTES


def test_rows_that_a_checkpoint_covers_are_not_fed_again() -> None:
    with SpoolServer() as node:
        done = {4: ((0, 150), (420, 440), (990, 1001)), 5: ((0, 7),)}
        again = replace(order([node.target]), done=done, skipped=frozenset({5}))
        assert Feeder(again, 4).feed(batches(1001, 100)) == FedPartition(4, 1001)
        read = iter([numbers(0, 1)] * 9)
        assert Feeder(again, 5).feed(read) == FedPartition(5)
        assert next(read, "none") == "none", "the Python worker is not used again"
        slow = (numbers(0, 1) for _ in range(1000) if not threading.Event().wait(0.05))
        assert Feeder(again, 5).feed(slow) == FedPartition(5)
        assert next(slow, "none") != "none", "50 s of them are read"
        assert node.values == [*range(150, 420), *range(440, 990)]
        assert [v for piece in node.spooled for v in piece.rows] == node.values


@pytest.mark.parametrize("size", [7, 40])
def test_rows_that_are_read_again_are_those_that_were_fed_before(size: int) -> None:
    with SpoolServer() as node:
        spec = replace(order([node.target]), digests={})
        Feeder(spec, 4).feed(batches(100, 10))
        digest = node.digests[3]
        assert digest[0] == 40
        again = replace(spec, digests={4: digest}, done={4: ((0, 15),)})
        assert Feeder(again, 4).feed(batches(100, size)) == FedPartition(4, 100)
        others = (numbers(at, at + size) for at in range(1, 100, size))
        for wrong in (others, batches(39, size)):
            with pytest.raises(ConfigError, match="partition 4 again, and its first 40 rows"):
                Feeder(again, 4).feed(wrong)
        assert Feeder(again, 5).feed(batches(30, size)) == FedPartition(5, 30)
        Feeder(replace(spec, digests=None), 4).feed(batches(10, 10))
        assert node.digests[-1] is None


def test_what_came_of_a_partition_crosses_spark_as_one_row() -> None:
    with SpoolServer() as node:
        (row,) = FeedDataFrame(order([node.target]), ("a.b",))(batches(10, 10))
        assert {piece.batch.schema.names[0] for piece in node.spooled} == {"a.b"}
    names = [column.split()[0] for column in FED_SCHEMA.split(", ")]
    assert row.schema == pa.schema([(name, pa.int64()) for name in names])
    assert FedPartition(**row.to_pylist()[0]) == FedPartition(0, 10)


@pytest.mark.parametrize("opening", ["store", "close"])
def test_rows_that_are_not_wanted_any_more_are_not_sent(opening: Answer) -> None:
    script = answers("store", "store", "store and close", default="close")
    with SpoolServer(answer=script, opening=opening) as node:
        fed = Feeder(order([node.target]), 0).feed(itertools.cycle(batches(1000, 10)))
        assert fed == FedPartition(0)
        assert len(node.values) == (30 if opening == "store" else 0)
        assert len(node.seen) <= 4, "two pieces may be under way when the agent closes"


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_rows_of_a_finished_cluster_are_no_failure(when: str) -> None:
    """The coordinator says that every `map_fun` has returned; the agent is gone."""

    async def scene(spec: messages.FeedSpec, cut: Callable[[], None]) -> FedPartition:
        async with room() as finished:
            finished.heard.failure = None
            again = replace(spec, coordinator=finished.address.url, token=ROOMS_TOKEN)
            return await asyncio.to_thread(Feeder(again, 4).feed, then(batches(100, 10), 6, cut))

    with SpoolServer(token=ROOMS_TOKEN) as node, NodeProxy(node.target) as link:
        if when == "before":
            link.cut()
        assert asyncio.run(scene(order([link.target]), link.cut)) == FedPartition(4)


def test_agent_that_stays_full_is_named_when_time_is_up() -> None:
    with SpoolServer(answer=lambda _: "say nothing") as node:
        feed = Feeder(order([node.target], timeout_s=0.3), 0)
        why = "its feed memory is full.* Raise the timeout"
        with pytest.raises(FeedTimeoutError, match=f"worker:0 stored no row of feed .* s: {why}"):
            feed.feed(batches(1000, 100))


def test_agent_that_cannot_be_reached_is_named_with_what_to_set() -> None:
    with SpoolServer() as node, NodeProxy(node.target) as proxy:
        proxy.cut()
        feed = Feeder(order([proxy.target]), 0)
        with pytest.raises(FeederError, match=r"worker:0: .*connect.* set SPARKDL_NODE_HOST"):
            feed.feed(batches(10, 10))
        assert feed.unreachable == proxy.target


@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize(
    ("answer", "reason"), [("fail", "the spool is on fire"), ("babble", "JSON is malformed")]
)
def test_reason_of_agent_that_stops_a_feed_is_told(at: int, answer: Answer, reason: str) -> None:
    script: list[Answer] = [*["store"] * (at - 1), answer]  # type: ignore[list-item]
    with SpoolServer(answer=answers(*script), opening=answer if not at else "store") as node:
        feed = Feeder(order([node.target]), 0)
        with pytest.raises(FeederError, match=f"worker:0: .*{reason}"):
            feed.feed(batches(100, 10))


@pytest.mark.parametrize("state", ["waiting for room", "between batches"])
def test_agent_that_dies_is_named(state: str) -> None:
    with SpoolServer() as node, NodeProxy(node.target) as link:
        source = batches(1000, 10)
        if state == "waiting for room":
            node.answer = lambda _: "say nothing"
        else:
            source = then(source, 5, link.cut)
        feed = Feeder(order([link.target]), 0)
        feeding = Running(lambda: feed.feed(source))
        if state == "waiting for room":
            node.wait_seen(1)
            link.cut()
        with pytest.raises(FeederError, match="worker:0: "):
            feeding.result()
        assert feed.unreachable == link.target


@pytest.mark.usefixtures("_far")
@pytest.mark.parametrize(
    ("then_it", "says"),
    [
        ("is cancelled", "it was cancelled"),
        ("runs out of time", "worker:0 stored no row of feed"),
        ("is cut", "worker:0: .*(Socket closed|broke while rows were under way)"),
    ],
)
def test_feeder_ends_whose_connection_takes_no_bytes(then_it: str, says: str) -> None:
    """GRPC itself waits for the socket, whatever becomes of the call."""
    timeout_s = 1.5 if then_it == "runs out of time" else 60.0
    with SpoolServer() as node, NodeProxy(node.target) as link:
        feed = Feeder(order([link.target], timeout_s=timeout_s), 0)
        source = then(batches(50_000, 10_000, width=80), 1, link.stall)
        feeding = Running(lambda: feed.feed(source))
        if then_it != "runs out of time":
            threading.Event().wait(1.0)  # the socket's buffers fill, which nobody can see
            feed.cancel() if then_it == "is cancelled" else link.cut()
        with pytest.raises((FeederError, FeedTimeoutError), match=says):
            feeding.result()
        assert feed.unreachable == (link.target if then_it == "is cut" else None)


RANGES = st.lists(st.tuples(st.integers(0, 120), st.integers(0, 120)), max_size=4)


@given(
    sizes=st.lists(st.integers(0, 40), max_size=6),
    other_size=st.integers(1, 40),
    widths=st.lists(st.integers(1, 2), min_size=6, max_size=6),
    done=RANGES,
    stored=st.integers(0, 12),
    ending=st.sampled_from(["store", "close", "store and close", "fail"]),
    is_near=st.booleans(),
)
def test_each_row_arrives_or_is_refused_and_a_second_attempt_brings_all_again(
    sizes: list[int],
    other_size: int,
    widths: list[int],
    done: list[tuple[int, int]],
    stored: int,
    ending: Answer,
    is_near: bool,
) -> None:
    """Random batches, rows that are done, refusals, and an end of the stream in its middle."""
    ends = list(itertools.accumulate(sizes))
    total = ends[-1] if ends else 0
    source = [
        numbers(end - size, end, width)
        for end, size, width in zip(ends, sizes, widths, strict=False)
    ]
    covered = merge_ranges(done)
    wanted = set(range(total)) - {row for start, stop in covered for row in range(start, stop)}
    script: list[Answer] = ["store"] * stored
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if not is_near:
            patch.setattr(FdSender, "connect", lambda name, token: None)
        first = stack.enter_context(SpoolServer(answer=answers(*script, default=ending)))
        spec = replace(order([first.target]), done={7: tuple(covered)})
        try:
            fed = Feeder(spec, 7).feed(iter(source))
        except FeederError:
            assert ending == "fail"
            second = stack.enter_context(SpoolServer(node_id=1))
            fed = Feeder(replace(spec, targets=(second.target,)), 7).feed(
                batches(total, other_size)
            )
            assert fed.num_rows == total
            assert second.values == sorted(wanted)
        else:
            assert fed.num_rows == -1 or set(first.values) == wanted
        assert fed.num_rows in (total, -1)
        assert fed.num_rows == total or "close" in ending
        assert len(first.values) == len(set(first.values)) <= len(wanted)
        for piece in first.spooled:
            assert piece.batch["x"].to_pylist() == list(piece.rows)
            assert piece.header == PutHeader(FEED, 0, "run", 7)


def test_process_that_stands_still_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as still:
        target = Target(0, "worker:0", f"grpc://127.0.0.1:{still.getsockname()[1]}")
        assert messages.is_there(target)
    assert not messages.is_there(target)


@pytest.mark.parametrize("driver", ["decides nothing", "has failed", "is gone"])
def test_node_that_cannot_be_reached_is_waited_for_until_the_driver_has_decided(
    driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = itertools.count()

    def fetch_cause(*coordinator: object) -> str:
        if driver == "is gone":
            raise OSError("no route")
        return "it broke" if driver == "has failed" and next(looks) == 2 else ""

    monkeypatch.setattr(feeder, "fetch_cause", fetch_cause)
    monkeypatch.setattr(feeder, "_LOOK_S", 0.02)
    target = Target(0, "worker:0", "grpc://127.0.0.1:1")
    spec = messages.FeedSpec("f", 0, "run", (target,), TOKEN, host_timeout_s=0.2)
    began_s = time.monotonic()
    cause = feeder.await_decision(spec, target, RuntimeError("worker:0: no word"))
    assert cause == ("it broke" if driver == "has failed" else "")
    assert (time.monotonic() - began_s >= 0.4) == (driver != "has failed")


ROWS = list(range(1000))


@pytest.fixture(scope="module")
def ours() -> Tls:
    return new_tls()


@pytest.fixture
def _far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Feeders are on another machine: no descriptor is handed over."""
    monkeypatch.setattr(FdSender, "connect", lambda name, token: None)


def two_batches() -> Iterator[pa.RecordBatch]:
    return iter([numbers(0, 400, 8), numbers(400, 1000, 8)])


@pytest.mark.usefixtures("_far")
@pytest.mark.parametrize("is_encrypted", [True, False])
def test_rows_and_token_cross_in_the_clear_only_without_tls(is_encrypted: bool, ours: Tls) -> None:
    tls = ours if is_encrypted else None
    secrets = (b"Bearer secret", numbers(0, 400)["x"].buffers()[1].to_pybytes()[: 8 * 100])
    with SpoolServer(tls=tls) as node, NodeProxy(node.target, records=True) as network:
        assert node.target.uri.startswith("grpc+tls://" if tls else "grpc://")
        spec = replace(order([network.target]), trust=tls.trust if tls else None)
        Feeder(spec, 0).feed(two_batches())
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
def test_untrusted_gets_no_row_and_is_told_soon(
    server: str, client: str, reason: str, ours: Tls
) -> None:
    known = {"ours": ours.trust, "another": new_tls().trust, "none": None}
    with SpoolServer(tls=ours if server == "ours" else None) as node:
        scheme = "grpc" if client == "none" else "grpc+tls"
        target = replace(node.target, uri=f"{scheme}://127.0.0.1:{node.port}")
        feeder = Feeder(replace(order([target]), trust=known[client]), 0)
        with pytest.raises(FeederError, match=reason):
            feeder.feed(two_batches())
        assert feeder.unreachable == target
        assert node.seen == []
        Feeder(replace(order([node.target]), trust=known[server]), 0).feed(two_batches())
        assert node.values == ROWS, "and nobody else is disturbed"
