"""A node passes rows on to others that have fewer, as the driver has decided.

Runs in: agent

Where nodes are many, a feeder brings rows to few of them (`groups.py`), so some end an epoch with a
few pieces more than others. These are rows that user code was not given; they leave the log here
and are appended to the log of the other node, within the same epoch. What that one does not take
comes back.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from sparkdl.control.messages import PassOn, RowsTo
from sparkdl.control.tls import Trust
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ReadError
from sparkdl.core.row_ranges import Span, spans_within
from sparkdl.feed.store.log import AppendRequest, Log
from sparkdl.feed.transfer.messages import (
    PutAck,
    PutHeader,
    PutPiece,
    call_options,
    connect,
    flight_reason,
)

Rows = tuple[pa.RecordBatch, tuple[Span, ...]]
"""A batch, and which rows it holds."""
_ROOM_S = 10.0
"""How long the other nodes may take to find room; then the rows stay here."""
_ANSWER_S = 10.0
"""How much longer an answer may take. Together that is less than the driver waits."""


class RowsPassing(threading.Thread):
    """Passes rows on, and ends.

    Args:
        rows: what was taken back from the child; no more than `order` names.
        log: where they were, and what others do not take goes.
        on_end: called on this thread, with why it is not known where the rows are, if so.
    """

    def __init__(
        self,
        order: PassOn,
        rows: Iterable[Rows],
        log: Log,
        token: str,
        trust: Trust | None,
        on_end: Callable[[PassOn, Log, str], None],
    ) -> None:
        super().__init__(name=f"sparkdl-passing-{order.feed}", daemon=True)
        self._order = order
        self._rows = deque(rows)
        self._log = log
        self._token = token
        self._trust = trust
        self._on_end = on_end
        self._deadline = Deadline.after(None)

    def run(self) -> None:
        """Pass the rows on."""
        self._deadline, problem = Deadline.after(_ROOM_S), ""
        try:
            for to in self._order.to:
                for rows in _first(self._rows, to.rows):
                    if not self._put(to, rows):
                        self._keep(rows)
            for rows in self._rows:
                self._keep(rows)
        except (pa.ArrowException, OSError) as error:
            # Whether the other node has stored the rows is not known, so they cannot be kept here.
            problem = f"rows could not be passed on: {flight_reason(error)}"
        except ReadError as error:
            problem = str(error)
        self._on_end(self._order, self._log, problem)

    def _put(self, to: RowsTo, rows: Rows) -> bool:
        """Send a batch to another node; return whether it is there."""
        batch, spans = rows
        order = self._order
        header = PutHeader(
            order.feed, order.epoch, order.run, -1, generation=order.generation, keep=order.keep
        )
        piece = msgspec.json.encode(PutPiece(0, batch.num_rows, spans=spans))
        options = call_options(self._token, max(0.0, self._deadline.remaining_s) + _ANSWER_S)
        descriptor = flight.FlightDescriptor.for_command(msgspec.json.encode(header))
        with connect(to.uri, self._trust) as client:
            writer, answers = client.do_put(descriptor, batch.schema, options)
            with writer:
                ack = _ack(answers)
                while not ack.closed and not self._deadline.has_passed:
                    writer.write_with_metadata(batch, piece)
                    ack = _ack(answers)
                    if ack.accepted:
                        writer.done_writing()
                        return True
                writer.done_writing()
        return False

    def _keep(self, rows: Rows) -> None:
        batch, spans = rows
        request = AppendRequest(
            self._order.epoch, keep=self._order.keep, spans=spans, run=self._order.run
        )
        self._log.append_in_time(batch, request)


def _ack(answers: flight.FlightMetadataReader) -> PutAck:
    buffer = answers.read()
    if buffer is None:
        raise pa.ArrowException("the other node has ended the stream")
    return msgspec.json.decode(buffer.to_pybytes(), type=PutAck)


def _first(rows: deque[Rows], count: int) -> list[Rows]:
    """Remove and return the first `count` rows."""
    found: list[Rows] = []
    while count > 0 and rows:
        batch, spans = rows.popleft()
        if batch.num_rows > count:
            rest = tuple(spans_within(spans, [(count, batch.num_rows)]))
            rows.appendleft((batch.slice(count), rest))
            batch, spans = batch.slice(0, count), tuple(spans_within(spans, [(0, count)]))
        found.append((batch, spans))
        count -= batch.num_rows
    return found
