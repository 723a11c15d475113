"""What a feed's life says to its user: errors and warnings, with what to do. Pure.

Runs in: driver
"""

from __future__ import annotations

from sparkdl.control.messages import MAX_MESSAGE_NBYTES, ReadShare, encode
from sparkdl.core.errors import ConfigError, FeedTimeoutError
from sparkdl.driver.feeds.coverage import Call, FeedRequest
from sparkdl.driver.feeds.state import (
    Action,
    Cutting,
    Delivering,
    Feed,
    LogFetched,
    Reading,
    Warn,
)


def standstill(state: Delivering | Cutting | Reading, event: LogFetched) -> FeedTimeoutError:
    """Return the error of a call in which nothing has moved for the feed timeout."""
    counts = state.feed.nodes.counts_of(state.run.node_ids)
    count, name = counts[event.node_id], state.run.name_of(event.node_id)
    is_job = isinstance(state, Delivering) and state.is_job_running
    has_rows = state.run.table.has_rows or any(each.rows_received for each in counts.values())
    if is_job and not has_rows:
        return FeedTimeoutError(
            f"feed {state.feed.name!r}: its Spark job has brought no row to any node for "
            f"{state.run.spec.timeout_s:g} s. It still computes the rows, or waits for a task slot "
            "that nodes or other jobs hold: look at it in the Spark UI. Raise the timeout of the "
            "feed in the first case; in the second add executors or cores, or launch with "
            "Startup(placement='detached')"
        )
    tail = "".join(f"\n  | {line}" for line in event.lines) or " (nothing)"
    return FeedTimeoutError(
        f"feed {state.feed.name!r} made no progress for {state.run.spec.timeout_s:g} s: {name} "
        f"has read {count.rows_consumed} rows in {count.steps} steps, and received "
        f"{count.rows_received}. Raise the feed's timeout if a step may take longer; otherwise "
        f"see what it waits for{event.unfed and f' ({event.unfed})'}. Last log lines of "
        f"{name}:{tail}"
    )


def check_size(message: ReadShare) -> None:
    """Check that a node's share of files fits into a message.

    Raises:
        ConfigError: if it does not.
    """
    nbytes = len(encode(message))
    if nbytes > MAX_MESSAGE_NBYTES:
        files, ranges = len(message.share.files), len(message.share.ranges)
        raise ConfigError(
            f"a node's share, {ranges} row groups in {files} files, takes {nbytes} bytes to tell, "
            f"and {MAX_MESSAGE_NBYTES} are allowed. Write fewer and larger files (row groups of "
            "some 100 MB), feed a part of the files at a time, or use more nodes"
        )


def warn_of_reader(name: str, request: FeedRequest, call: Call) -> list[Action]:
    """Return a warning if the nodes could read the rows themselves, and must not."""
    if call.request.data is request.data:
        return []
    return [
        Warn(
            f"Feed {name!r}: the rows cross Spark all the same, because the checkpoint says which "
            "of them have been used by their numbers in Spark's partitions"
        )
    ]


def warn_of_nothing(feed: Feed) -> list[Action]:
    """Return a warning if a stream has ended that has brought no row."""
    brought = feed.stream.brought.values() if feed.stream is not None else ()
    if feed.stream is None or any(sum(rows.values()) for rows in brought):
        return []
    return [Warn(f"Feed {feed.name!r}: the stream has ended without having brought a row")]


def warn_of_lost(name: str, calls: list[Call]) -> list[Action]:
    """Return a warning if micro-batches are lost to the model."""
    rows = sum(max(0, sum(call.shape.rows.values()) - call.rows_covered) for call in calls)
    if not rows:
        return []
    return [
        Warn(
            f"Feed {name!r}: the nodes begin anew at their last checkpoint. Since then they have "
            f"had {rows} rows in {len(calls)} micro-batches of a stream, which are lost to the "
            "model: Spark does not bring them again. Make checkpoints more often where that matters"
        )
    ]
