"""The Spark tasks that infer: each sends its partition's rows to one node, and returns the results.

Runs in: feeder

    batches ─▶ _Partition ─▶ pump (a thread) ─▶ node
    results ◀─────────────────────────────────────┘

While a new generation starts, no node takes rows, so the tasks wait for it. If a node is lost after
it has taken rows, the task fails, and Spark repeats it.
"""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from sparkdl.control.auth import fetch_cause
from sparkdl.core.deadline import Deadline
from sparkdl.core.failure import Code
from sparkdl.feed.store.session import Session
from sparkdl.feed.transfer.messages import (
    SHUT_DOWN,
    ExchangeHeader,
    FeederError,
    FeedSpec,
    Target,
    flight_reason,
    is_there,
)
from sparkdl.values.results import result_columns
from sparkdl.values.rows import encode_rows, rows

_ASK_AGAIN_S = 0.5
_LOOK_S = 2.0
"""How often to check that the host of a node that owes results is alive."""


@dataclass(frozen=True)
class InferColumns:
    """For `DataFrame.mapInArrow`: each batch, of which `map_fun` sees `names`, with its results."""

    spec: FeedSpec
    names: tuple[str, ...]
    results: pa.Schema

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        sent: deque[pa.RecordBatch] = deque()
        results: list[pa.RecordBatch] = []
        rows = 0
        for data in _spark_answers(self.spec, self._named(batches, sent)):
            for batch in _batches(data):
                columns = result_columns(batch, self.results)
                results.append(pa.RecordBatch.from_arrays(columns, schema=self.results))
                rows += batch.num_rows
            # Results come in other batches than rows went out: they are joined first.
            while sent and rows >= (count := sent[0].num_rows):
                table = pa.Table.from_batches(results)
                yield self._joined(sent.popleft(), table.slice(0, count))
                results = table.slice(count).to_batches()
                rows -= count

    def _named(
        self, batches: Iterator[pa.RecordBatch], sent: deque[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                # As they came: map_fun may see other names than the columns of the result have.
                sent.append(batch)
                yield batch.rename_columns(self.names)

    def _joined(self, batch: pa.RecordBatch, results: pa.Table) -> pa.RecordBatch:
        columns = [*batch.columns, *(column.combine_chunks() for column in results.columns)]
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema([*batch.schema, *self.results]))


@dataclass(frozen=True)
class InferRdd:
    """For `RDD.mapPartitions`: one result per row, in order."""

    spec: FeedSpec

    def __call__(self, values: Iterable[Any]) -> Iterator[Any]:
        for data in _spark_answers(self.spec, encode_rows(values)):
            yield from decode_results(data)


def decode_results(data: bytes) -> list[Any]:
    return [row for batch in _batches(data) for row in rows(batch)]


def _batches(data: bytes) -> list[pa.RecordBatch]:
    with pa.ipc.open_stream(data) as reader:
        return list(reader)


def answers(
    spec: FeedSpec, batches: Iterator[pa.RecordBatch], partition: int, attempt: int = 0
) -> Iterator[bytes]:
    """Yield encoded results of a partition; a task that Spark repeats asks another node first."""
    target = spec.targets[(partition + attempt) % len(spec.targets)]
    # A Flight stream has one schema, and rows of an RDD may have several.
    for _schema, group in groupby(batches, key=lambda batch: batch.schema):
        yield from exchange(spec, f"{partition}.{uuid.uuid4().hex[:12]}", target, group)


def _spark_answers(spec: FeedSpec, batches: Iterator[pa.RecordBatch]) -> Iterator[bytes]:
    from pyspark import TaskContext

    context = TaskContext.get()
    numbers = (context.partitionId(), context.attemptNumber()) if context else (0, 0)
    yield from answers(spec, batches, *numbers)


def exchange(
    spec: FeedSpec, name: str, target: Target, batches: Iterator[pa.RecordBatch]
) -> Iterator[bytes]:
    """Send one inference partition to a node; yield Arrow IPC streams of encoded result rows.

    While a new generation starts, no node takes rows, so this waits for one that does. If that node
    is lost, the task fails, and Spark repeats it.

    Raises:
        FeederError: if the node failed or answered wrongly; the message is the node's, and has the
            cluster's root cause as soon as it has failed for good.
    """
    rows = (batch for batch in batches if batch.num_rows)
    # An empty partition needs no node, and so none that is alive.
    if (first := next(rows, None)) is None:
        return
    call = _open(spec, name, target)
    try:
        yield from call.results(first.schema, itertools.chain([first], rows))
    except FeederError as error:
        if not Code.WRONG_ANSWER.is_in(error):
            _raise_cause(spec, error)
        raise


def _open(spec: FeedSpec, name: str, target: Target) -> _Call:
    """Return a call that a node has taken, the first of which is `target`."""
    nodes = [target, *(node for node in spec.targets if node != target)]
    patience = Deadline.after(min(spec.patience_s, spec.timeout_s))
    for tries in itertools.count():
        call = _Call(spec, f"{name}.{tries}" if tries else name, nodes[tries % len(nodes)])
        try:
            call.open()
            return call
        except FeederError as error:
            if Code.CLUSTER_FAILED.is_in(error):
                raise
            # A pause only after all nodes have been asked.
            if (tries + 1) % len(nodes) == 0:
                _raise_cause(spec, error)
                if patience.has_passed:
                    raise
                threading.Event().wait(min(_ASK_AGAIN_S, patience.remaining_s))
    raise AssertionError("unreachable: the loop has no end")


class _Call:
    def __init__(self, spec: FeedSpec, name: str, target: Target) -> None:
        self._spec = spec
        self._target = target
        self._command = msgspec.json.encode(ExchangeHeader(spec.feed, name, spec.timeout_s))
        self._problems: list[BaseException] = []
        self._changed = threading.Condition()
        self._rows = Session()
        self._is_over = False
        self._client: Any = None
        self._writer: Any = None
        self._reader: Any = None
        self._writing = 2
        """Threads that still have the writer: the last of them closes it."""

    def open(self) -> None:
        """Wait until the node has taken the call."""
        try:
            self._client = self._spec.connect(self._target.uri)
            self._writer, self._reader = self._client.do_exchange(
                flight.FlightDescriptor.for_command(self._command), self._spec.options()
            )
            _ = self._reader.schema  # which the node sends first
        except (pa.ArrowException, OSError) as error:
            if self._writer is not None:
                self._writing = 1
                self._end_writing()
            if self._client is not None:
                self._client.close()
            raise self._error(error) from error

    def results(self, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Iterator[bytes]:
        # Rows go out in a thread of their own, or both ends could wait for room to send.
        pump = self._start(self._pump, schema, batches)
        self._start(self._watch)
        try:
            for chunk in self._reader:
                data = chunk.data.column(0)[0].as_py()
                rows = sum(batch.num_rows for batch in _batches(data))
                with self._changed:
                    self._rows.answer(rows, time.monotonic())
                yield data
            pump.join(self._spec.timeout_s)
            self._writer.close()
        except (pa.ArrowException, OSError) as error:
            # This end has cancelled the call: the reason for that is the error. It may be Spark's,
            # and then Flight's is about the stream that it has ended.
            is_ours = self._problems and (
                isinstance(error, flight.FlightCancelledError)
                or not isinstance(self._problems[0], (pa.ArrowException, OSError))
            )
            cause = self._problems[0] if is_ours else error
            if not isinstance(cause, (pa.ArrowException, OSError)):
                raise cause from None
            raise self._error(cause) from cause
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
            self._reader.cancel()  # a caller that stops early does not leave the node waiting
            self._end_writing()
            self._client.close()

    def _start(self, work: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=work, args=args, name="sparkdl-exchange", daemon=True)
        thread.start()
        return thread

    def _pump(self, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
        try:
            self._writer.begin(schema)
            for batch in batches:
                if self._is_over:
                    break
                with self._changed:
                    # Counted first: the answer may come before `write_batch` returns.
                    self._rows.send(batch.num_rows, time.monotonic())
                self._writer.write_batch(batch)
            self._writer.done_writing()
        except BaseException as error:  # noqa: BLE001 (raised by the other thread)
            self._give_up(error)
        finally:
            self._end_writing()

    def _end_writing(self) -> None:
        """Close the writer if it is unused now: otherwise Arrow closes it, and prints errors."""
        with self._changed:
            self._writing -= 1
            is_last = not self._writing
        if is_last:
            with suppress(pa.ArrowException, OSError):  # raised where it was met first
                self._writer.close()

    def _watch(self) -> None:
        """End the call once its host is gone, or answers are later than the node itself allows."""
        # A node reports missing results itself; longer silence means that the network is gone.
        limit_s = 2 * self._spec.timeout_s
        silent_since_s = None
        while True:
            with self._changed:
                now_s = time.monotonic()
                owed_s = self._rows.owed_s(now_s)
                if self._is_over or owed_s >= limit_s:
                    break
                self._changed.wait(min(_LOOK_S, limit_s - owed_s))
            # The kernel does not notice a cut link while nothing is sent.
            if owed_s < _LOOK_S or is_there(self._target):
                silent_since_s = None
            elif now_s - (silent_since_s := silent_since_s or now_s) >= self._spec.host_timeout_s:
                limit_s = now_s - silent_since_s
                break
        if not self._is_over:
            silence = f"no message for {limit_s:.0f} s"
            name = self._target.name
            self._give_up(FeederError(f"inference at {name} failed: {silence}"))

    def _give_up(self, error: BaseException) -> None:
        self._problems.append(error)
        self._reader.cancel()

    def _error(self, cause: BaseException) -> FeederError:
        return FeederError(f"inference at {self._target.name} failed: {flight_reason(cause)}")


def _raise_cause(spec: FeedSpec, error: FeederError) -> None:
    """Raise the cluster's end, if that is why no node answers."""
    if not spec.coordinator:
        return
    try:
        cause = fetch_cause(spec.coordinator, spec.token, spec.trust)
    except OSError:
        raise FeederError(f"{SHUT_DOWN} ({error.args[0]})") from error
    if cause is None:
        raise FeederError(
            f"map_fun has returned on every node, and none answers any more ({error.args[0]})"
        ) from error
    if cause:
        raise FeederError(
            f"{Code.CLUSTER_FAILED} the cluster has failed: {cause} ({error.args[0]})"
        ) from error
