"""TensorFlowOnSpark's `TFNode`: paths, and the feed of a node.

Runs in: child

https://github.com/yahoo/TensorFlowOnSpark/blob/v2.2.5/tensorflowonspark/TFNode.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from sparkdl.core.errors import ConfigError
from sparkdl.core.files import absolute_url
from sparkdl.core.spec import DEFAULT_FEED
from sparkdl.node.legacy import NodeManager, RemovedCalls
from sparkdl.tfos.marker import EndPartition

__all__ = ["DataFeed", "export_saved_model", "hdfs_path", "release_port", "start_cluster_server"]


class DataFeed:
    """The rows of a manager's queues, for a program's own tests.

    With `ctx.mgr` of a node it is the feed that Spark fills, a `sparkdl.datasets.tfos.DataFeed`.
    In a queue `None` is the end of the feed, `marker.EndPartition` that of a partition.

    Args:
        mgr: `ctx.mgr`, or what `TFManager.start` returns.
        train_mode: in training, batches run across partitions; in inference, a batch ends with its
            partition, and `batch_results` answers one result for each row.
        input_mapping: column name to tensor name. Batches are then dicts: tensor name to the list
            of that column's values; tensors are in the order of the sorted column names.

    Attributes:
        input_tensors: the tensor names, in that order; `None` without a mapping.
        done_feeding: whether the end of the feed has been read.
    """

    def __new__(
        cls,
        mgr: Any,
        train_mode: bool = True,
        qname_in: str = DEFAULT_FEED,
        qname_out: str = "output",
        input_mapping: Mapping[str, str] | None = None,
    ) -> Any:
        if isinstance(mgr, NodeManager):
            return mgr.data_feed(train_mode, qname_in, qname_out, input_mapping)
        return super().__new__(cls)

    def __init__(
        self,
        mgr: Any,
        train_mode: bool = True,
        qname_in: str = DEFAULT_FEED,
        qname_out: str = "output",
        input_mapping: Mapping[str, str] | None = None,
    ) -> None:
        self.mgr, self.train_mode = mgr, train_mode
        self.qname_in, self.qname_out = qname_in, qname_out
        self.done_feeding = False
        self.input_tensors = (
            [tensor for _, tensor in sorted(input_mapping.items())] if input_mapping else None
        )

    def next_batch(self, batch_size: int) -> Any:
        """Wait for `batch_size` rows and return them; fewer at the end of the feed.

        Returns:
            A list of rows, or with an `input_mapping` a dict of lists.
        """
        queue, rows = self.mgr.get_queue(self.qname_in), list[Any]()
        while len(rows) < batch_size and not self.done_feeding:
            row = queue.get()
            # So that a test may wait by `queue.join()`, as TensorFlowOnSpark's feeders did.
            queue.task_done()
            if row is None:
                self.done_feeding = True
            elif not isinstance(row, EndPartition):
                rows.append(row)
            elif rows and not self.train_mode:
                break
        if self.input_tensors is None:
            return rows
        return {tensor: [row[i] for row in rows] for i, tensor in enumerate(self.input_tensors)}

    def should_stop(self) -> bool:
        """Whether the end of the feed has been read."""
        return self.done_feeding

    def batch_results(self, results: Sequence[Any]) -> None:
        """Answer the oldest unanswered rows, one result each, in order."""
        if self.train_mode:
            raise ConfigError("batch_results needs a DataFeed with train_mode=False")
        for result in results:
            self.mgr.get_queue(self.qname_out).put(result)

    def terminate(self) -> None:
        """Take no more rows: the Spark job that feeds this node ends early."""
        self.mgr.set("state", "terminating")
        queue = self.mgr.get_queue(self.qname_in)
        while not queue.empty():
            queue.get()
            queue.task_done()


def hdfs_path(ctx: Any, path: str) -> str:
    """Return `path` as a URL on the default file system.

    A path with any scheme is returned unchanged. A relative path is in the user's home,
    or on a local file system in the driver's working directory.

    Args:
        ctx: an object with `defaultFS` and `working_dir`.
    """
    return absolute_url(path, ctx.defaultFS, ctx.working_dir)


def release_port(ctx: Any) -> None:
    """Close the socket that holds this node's port, so that a server can bind it."""
    ctx.release_port()


def start_cluster_server(ctx: Any, num_gpus: int = 1, rdma: bool = False) -> NoReturn:
    """Raise `RemovedError`, which says what to write instead: it is TensorFlow 1's."""
    RemovedCalls().start_cluster_server(num_gpus, rdma)


def export_saved_model(sess: Any, export_dir: str, tag_set: str, signatures: Any) -> NoReturn:
    """Raise `RemovedError`, which says what to write instead: it is TensorFlow 1's."""
    RemovedCalls().export_saved_model(sess, export_dir, tag_set, signatures)
