"""What became of the rows of one `feed` call. Pure.

Runs in: driver
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from sparkdl.control.messages import FeedCount
from sparkdl.driver.feeds.calls import Call


@dataclass(frozen=True)
class FeedReport:
    """What became of the rows of one `feed` call. A row counts once for each epoch.

    Attributes:
        epochs: epochs that were fed whole.
        rows: rows delivered, by node name; after a restart those since.
        steps: batches that user code was given, by node name; 0 where it reads row by row. Like
            `rows_padded`, `rows_dropped` and `passes` it counts from the last restart on.
        rows_used: rows that user code was given, `rows_covered` among them.
        rows_padded: rows that it was given again to fill a step, see `tail` of `ctx.batches`.
        rows_dropped: rows that it was not given because they did not fill a step.
        rows_unused: rows that no node wanted, that a node received and did not read, or that it
            carries to an epoch to come.
        passes: how many times the data has been read; further epochs came from the nodes' logs.
        rows_covered: rows that were fed before a restart, or in an earlier run, and that the
            checkpoint covers at which the training went on.
    """

    epochs: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    rows_used: int = 0
    rows_padded: int = 0
    rows_dropped: int = 0
    rows_unused: int = 0
    passes: int = 0
    rows_covered: int = 0

    @property
    def rows_fed(self) -> int:
        """Rows delivered to all nodes, each once: `rows_covered`, and `rows` of all nodes."""
        return self.rows_covered + sum(self.rows.values())


@dataclass(frozen=True)
class Fed:
    """How far a call has come.

    Attributes:
        delivered: rows of all epochs by node id, if none was ended early.
        goes_on: what was not used yet may be, for more of the stream is to come.
    """

    feed: str
    epochs: int
    passes: int
    rows_refused: int
    delivered: Mapping[int, int]
    rows_covered: int = 0
    goes_on: bool = False


def report(
    fed: Fed,
    names: Mapping[int, str],
    before: Mapping[int, FeedCount],
    after: Mapping[int, FeedCount],
) -> FeedReport:
    """Return what became of the rows, from what the nodes had told before and tell now.

    Args:
        names: the nodes that were fed, by node id.
    """

    def since(field_: str, node_id: int) -> int:
        return int(getattr(after[node_id], field_) - getattr(before[node_id], field_))

    def total(field_: str) -> int:
        return sum(max(0, since(field_, node_id)) for node_id in names)

    rows, unread = {}, 0
    for node_id, name in names.items():
        received = since("rows_received", node_id)
        read = since("rows_consumed", node_id) + since("rows_dropped", node_id)
        # A call also reads what one before it has carried, so that `read` may be more.
        rows[name] = max(received, fed.delivered.get(node_id, read))
        unread += max(0, rows[name] - read)
    unused = fed.rows_refused + unread
    return FeedReport(
        fed.epochs,
        rows,
        {name: since("steps", node_id) for node_id, name in names.items()},
        fed.rows_covered + total("rows_consumed"),
        total("rows_padded"),
        total("rows_dropped"),
        unused,
        fed.passes,
        fed.rows_covered,
    )


def unused_warning(fed: Fed, told: FeedReport) -> Iterator[str]:
    """Return what the log says of rows that were not used, if there are any."""
    if told.rows_unused and not fed.goes_on:
        yield (
            f"Feed {fed.feed!r}: {told.rows_unused} rows were not used: map_fun ended or called "
            "terminate() before it had read them, or tail='carry' keeps them for an epoch to come"
        )


def covered_report(call: Call) -> FeedReport:
    """Return the report of a call of which a checkpoint covers all rows, perhaps since a moment."""
    covered = call.rows_covered
    return FeedReport(call.asked.epochs, rows_used=covered, rows_covered=covered)
