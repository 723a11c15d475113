"""One partition of inference: its rows go to one node, and its results come back.

Runs in: feeder

    batches ─▶ _Partition ─▶ pump (a thread) ─▶ node
    results ◀─────────────────────────────────────┘

A node that is lost: another takes the rows whose results have not been passed on. None takes rows
while all are on their way to the next generation, for which they are given time.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from urllib.request import ProxyHandler, Request, build_opener

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from sparkdl.control.auth import CAUSE_PATH, bearer
from sparkdl.core.deadline import Deadline
from sparkdl.feed.infer.exchange import CLUSTER_FAILED, WRONG_ANSWER
from sparkdl.feed.transfer.request import FeederError, FeedSpec, Target, flight_reason
from sparkdl.feed.transfer.server import ExchangeHeader

REOPEN_WAIT_S = 10.0
"""How long nodes that cannot be reached are asked again."""
_ASK_AGAIN_S = 0.5
_CAUSE_WAIT_S = 5.0
_SILENCE_FACTOR = 2.0
_SILENCE_MARGIN_S = 10.0
"""A node itself tells of results that do not come; silence beyond that is a network gone."""


def exchange(
    order: FeedSpec, name: str, target: Target, batches: Iterator[pa.RecordBatch]
) -> Iterator[bytes]:
    """Send one inference partition to a node; yield Arrow IPC streams of encoded result rows.

    A node that is lost is replaced by another, or by its next generation: that answers the rows
    whose results have not been passed on.

    Args:
        target: the node that is asked first.

    Raises:
        FeederError: if the node failed or answered wrongly; the message is the node's, and has the
            cluster's root cause as soon as it has failed for good.
    """
    partition = _Partition(batches)
    if partition.at(0) is None:
        return
    nodes = [target, *(node for node in order.targets if node != target)]
    answered = -1
    for tries in itertools.count():
        if partition.answered > answered:  # so far the nodes have got
            answered = partition.answered
            patience = Deadline.after(min(order.patience_s, order.timeout_s))
            unreachable = Deadline.after(min(REOPEN_WAIT_S, order.patience_s, order.timeout_s))
        if tries % len(nodes) == 0:
            is_there = False  # some node, though it may take no rows
        node = nodes[tries % len(nodes)]
        call = _Call(order, name if tries == 0 else f"{name}.{tries}", node, partition)
        try:
            yield from call.results()
            return
        except FeederError as error:
            is_there = is_there or not isinstance(error.__cause__, flight.FlightUnavailableError)
            if WRONG_ANSWER in str(error) or CLUSTER_FAILED in str(error):
                raise
            if partition.at(partition.answered) is None:
                return  # it was lost with nothing left to answer
            deadline = patience if is_there else unreachable
            if (tries + 1) % len(nodes) == 0:
                if deadline.has_passed or (not is_there and tries < len(nodes)):
                    _raise_cause(order, error, is_final=deadline.has_passed)
                threading.Event().wait(min(_ASK_AGAIN_S, deadline.remaining_s))


class _Partition:
    """The rows of a partition: kept for another node until their results are passed on."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self.answered = 0
        self.error: BaseException | None = None
        self._batches = batches
        self._lock = threading.Lock()  # a lost node's pump may still wait for Spark's next batch
        self._held: deque[pa.RecordBatch] = deque()
        self._start = self._stop = 0

    def at(self, row: int) -> pa.RecordBatch | None:
        """Return the rest of the batch that holds a row; `None` after the last, or if answered.

        Raises whatever Spark's side raised, each time.
        """
        with self._lock:
            while self._stop <= row:
                if self.error is not None:
                    raise self.error
                try:
                    batch = next(self._batches, None)
                except BaseException as error:
                    self.error = error
                    raise
                if batch is None:
                    return None
                self._held.append(batch)
                self._stop += batch.num_rows
            start = self._start
            for batch in self._held:
                if start <= row < start + batch.num_rows:
                    return batch.slice(row - start)
                start += batch.num_rows
            return None

    def pass_on(self, rows: int) -> None:
        """Note that the results of the next `rows` rows are passed on."""
        self.answered += rows
        # Whoever holds the lock may wait for Spark; what is held is let go of another time.
        if self._lock.acquire(blocking=False):
            try:
                while self._held and self._start + self._held[0].num_rows <= self.answered:
                    self._start += self._held.popleft().num_rows
            finally:
                self._lock.release()


class _Call:
    """One attempt at one node."""

    def __init__(self, order: FeedSpec, name: str, target: Target, partition: _Partition) -> None:
        self._order = order
        self._target = target
        self._partition = partition
        self._command = msgspec.json.encode(ExchangeHeader(order.feed, name, order.timeout_s))
        self._problems: list[BaseException] = []
        self._changed = threading.Condition()
        self._rows_sent = 0
        self._rows_answered = 0
        self._moved_s = 0.0
        self._is_over = False
        self._writing = 2
        """Threads that still have the writer: the last of them closes it."""

    def results(self) -> Iterator[bytes]:
        """Send the partition and yield what comes back."""
        with flight.connect(self._target.uri) as client:
            try:
                writer, reader = client.do_exchange(
                    flight.FlightDescriptor.for_command(self._command), self._order.options()
                )
            except (pa.ArrowException, OSError) as error:
                raise self._error(error) from error
            pump = self._start(self._pump, writer, reader)
            self._start(self._watch, reader)
            try:
                for chunk in reader:
                    data = chunk.data.column(0)[0].as_py()
                    rows = _rows_of(data)
                    self._count(answered=rows)
                    self._partition.pass_on(rows)
                    yield data
                pump.join(self._order.timeout_s)
                writer.close()
            except (pa.ArrowException, OSError) as error:
                if self._partition.error is not None:
                    raise self._partition.error from None
                is_ours = self._problems and isinstance(error, flight.FlightCancelledError)
                cause = self._problems[0] if is_ours else error
                if not isinstance(cause, (pa.ArrowException, OSError)):
                    raise cause from None
                raise self._error(cause) from cause
            finally:
                with self._changed:
                    self._is_over = True
                    self._changed.notify_all()
                reader.cancel()  # whoever stops asking does not leave the node waiting
                self._let_go(writer)

    def _start(self, work: object, *args: object) -> threading.Thread:
        thread = threading.Thread(
            target=work,  # type: ignore[arg-type]
            args=args,
            name="sparkdl-exchange",
            daemon=True,
        )
        thread.start()
        return thread

    def _pump(self, writer: flight.FlightStreamWriter, reader: flight.FlightStreamReader) -> None:
        first = row = self._partition.answered
        try:
            while (batch := self._partition.at(row)) is not None and not self._is_over:
                if row == first:
                    writer.begin(batch.schema)
                self._count(sent=batch.num_rows)
                writer.write_batch(batch)
                row += batch.num_rows
            writer.done_writing()
        except BaseException as error:  # noqa: BLE001 (raised by the other thread)
            self._give_up(error, reader)
        finally:
            self._let_go(writer)

    def _let_go(self, writer: flight.FlightStreamWriter) -> None:
        """Close the writer if nobody else has it: else Arrow does, and prints what it meets."""
        with self._changed:
            self._writing -= 1
            is_last = not self._writing
        if is_last:
            with suppress(pa.ArrowException, OSError):  # raised where it was met first
                writer.close()

    def _watch(self, reader: flight.FlightStreamReader) -> None:
        """End the call once rows have waited for an answer longer than the node itself allows."""
        limit_s = self._order.timeout_s * _SILENCE_FACTOR + _SILENCE_MARGIN_S
        with self._changed:
            while not self._is_over:
                is_owed = self._rows_answered < self._rows_sent
                left_s = self._moved_s + limit_s - time.monotonic() if is_owed else None
                if left_s is not None and left_s <= 0:
                    break
                self._changed.wait(left_s)
            else:
                return
        self._give_up(
            FeederError(f"inference at {self._target.name} failed: not a word for {limit_s:g} s"),
            reader,
        )

    def _give_up(self, error: BaseException, reader: flight.FlightStreamReader) -> None:
        self._problems.append(error)
        reader.cancel()

    def _count(self, sent: int = 0, answered: int = 0) -> None:
        with self._changed:
            if answered or self._rows_answered >= self._rows_sent:
                self._moved_s = time.monotonic()
            self._rows_sent += sent
            self._rows_answered += answered
            self._changed.notify_all()

    def _error(self, cause: BaseException) -> FeederError:
        return FeederError(f"inference at {self._target.name} failed: {flight_reason(cause)}")


def _raise_cause(order: FeedSpec, error: FeederError, is_final: bool) -> None:
    """Raise the cluster's failure, if that is why no node answers; the error itself, if final.

    The nodes of a cluster that has failed end after a few seconds, and cannot say why any more.
    """
    if order.coordinator:
        url = order.coordinator.replace("ws://", "http://", 1) + CAUSE_PATH
        request = Request(url, headers={"Authorization": bearer(order.token)})
        try:
            with build_opener(ProxyHandler({})).open(request, timeout=_CAUSE_WAIT_S) as answer:
                cause = answer.read().decode()
        except OSError:
            if is_final:
                raise FeederError(
                    "the cluster has been shut down, and no node answers any more: results of "
                    f"inference are lazy, so run the action on them before the shutdown ({error})"
                ) from error
            return
        if cause:
            raise FeederError(f"{CLUSTER_FAILED}: {cause} ({error})") from error
    if is_final:
        raise error


def _rows_of(data: bytes) -> int:
    with pa.ipc.open_stream(data) as stream:
        return sum(batch.num_rows for batch in stream)
