"""One pass over Parquet files: the driver lists and shares out, the nodes read.

Runs in: driver
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparkdl.control.messages import MAX_MESSAGE_NBYTES, FeedCount, ReadShare, encode
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, ReadError
from sparkdl.core.paths import absolute_url
from sparkdl.core.spec import ClusterSpec
from sparkdl.feed.order import FeedOrder
from sparkdl.feed.parquet import ParquetSource, list_files
from sparkdl.feed.parquet_paths import parquet_paths

if TYPE_CHECKING:
    from sparkdl.driver.controller import View
    from sparkdl.driver.feeds.feeding import FeedCall
    from sparkdl.driver.feeds.watch import FeedWatch


def listed(data: Any, spec: ClusterSpec) -> Any:
    """Return the `ParquetSource` that `data` names, if it names files; else `data` itself.

    Raises:
        ConfigError: if there are no such files, or they cannot be read, see `list_files`.
    """
    asked = parquet_paths(data)
    if asked is None:
        return data
    paths = [absolute_url(path, spec.default_fs, spec.working_dir) for path in asked.paths]
    return list_files(paths, asked.columns, asked.options)


def read_at_nodes(call: FeedCall, source: ParquetSource, order: FeedOrder, watch: FeedWatch) -> int:
    """Have each node read its share of `source`; wait until those that go on have.

    Returns:
        How many rows were not read because their node takes no more.

    Raises:
        ReadError: if a node could not read a file.
        ConfigError: if a share is too large for one message.
    """
    controller = call.controller
    counts_before, gone = controller.look(lambda view: (call.counts(view), call.gone_nodes(view)))
    targets = [target for target in order.targets if target.node_id not in gone]
    if not targets:
        watch.wait_for_reason()
        return source.num_rows - sum(stop - start for start, stop in order.done.get(0, ()))
    shares = source.shares(len(targets), done=order.done.get(0, ()))
    orders = {
        target.node_id: ReadShare(order.feed, order.epoch, share, order.keep)
        for target, share in zip(targets, shares, strict=True)
    }
    for message in orders.values():
        _check_size(message)
    for node_id, message in orders.items():
        controller.broadcast(message, {node_id}, order.generation)

    def going_on(view: View) -> dict[int, FeedCount]:
        left = orders.keys() - call.gone_nodes(view)
        return {node_id: count for node_id, count in call.counts(view).items() if node_id in left}

    def has_ended(view: View) -> bool:
        counts = going_on(view).values()
        has_problem = any(count.read_problem and _is_through(count, order) for count in counts)
        return has_problem or all(_is_through(count, order) for count in counts)

    controller.wait_for(
        lambda view: watch.has_reason() or watch.has_closed or has_ended(view),
        Deadline.after(None),
    )
    watch.raise_reason()
    if controller.look(call.is_unwanted):
        watch.wait_for_reason()  # which is about to see it
    after, still = controller.look(lambda view: (call.counts(view), going_on(view)))
    for target in targets:
        count = still.get(target.node_id)
        if count and count.read_problem and _is_through(count, order):
            raise ReadError(f"{target.name} could not read its share: {count.read_problem}")
    return sum(
        message.share.num_rows
        - (after[node_id].rows_received - counts_before[node_id].rows_received)
        for node_id, message in orders.items()
        if node_id not in still
    )


def _is_through(count: FeedCount, order: FeedOrder) -> bool:
    """Whether a node's reading for this epoch has come to its end."""
    return count.read_to == order.epoch


def _check_size(message: ReadShare) -> None:
    nbytes = len(encode(message))
    if nbytes > MAX_MESSAGE_NBYTES:
        files, ranges = len(message.share.files), len(message.share.ranges)
        raise ConfigError(
            f"a node's share, {ranges} row groups in {files} files, takes {nbytes} bytes to tell, "
            f"and {MAX_MESSAGE_NBYTES} are allowed. Write fewer and larger files (row groups of "
            "some 100 MB), feed a part of the files at a time, or use more nodes"
        )
