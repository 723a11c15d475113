"""TensorFlowOnSpark's `TFNode`: paths, and the feed of a node.

Runs in: child

https://github.com/yahoo/TensorFlowOnSpark/blob/v2.2.5/tensorflowonspark/TFNode.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from sparkdl.core.paths import absolute_url
from sparkdl.core.spec import DEFAULT_FEED
from sparkdl.node.legacy import RemovedCalls

__all__ = [
    "DataFeed",
    "export_saved_model",
    "hdfs_path",
    "release_port",
    "start_cluster_server",
]


class DataFeed:
    """The rows that Spark feeds to this node, see `sparkdl.datasets.tfos.DataFeed`.

    Args:
        mgr: `ctx.mgr`, or what `TFManager.start` returns.
        train_mode: in training, batches run across partitions; in inference, a batch ends with its
            partition, and `batch_results` answers one result for each row.
        input_mapping: column name to tensor name. Batches are then dicts: tensor name to the list
            of that column's values; tensors are in the order of the sorted column names.

    Attributes:
        input_tensors: the tensor names, in that order; `None` without a mapping.
    """

    def __init__(
        self,
        mgr: Any,
        train_mode: bool = True,
        qname_in: str = DEFAULT_FEED,
        qname_out: str = "output",
        input_mapping: Mapping[str, str] | None = None,
    ) -> None:
        self.mgr = mgr
        self.train_mode = train_mode
        self.qname_in = qname_in
        self.qname_out = qname_out
        self.input_tensors = (
            [tensor for _, tensor in sorted(input_mapping.items())] if input_mapping else None
        )
        self._feed = mgr.data_feed(train_mode, qname_in, qname_out, input_mapping)

    @property
    def done_feeding(self) -> bool:
        """Whether the end of the feed has been read."""
        return bool(self._feed.done_feeding)

    def next_batch(self, batch_size: int) -> Any:
        """Wait for `batch_size` rows and return them; fewer at the end of the feed.

        Returns:
            A list of rows, or with an `input_mapping` a dict of lists.
        """
        return self._feed.next_batch(batch_size)

    def should_stop(self) -> bool:
        """Whether the end of the feed has been read."""
        return self.done_feeding

    def batch_results(self, results: Sequence[Any]) -> None:
        """Answer the oldest unanswered rows, one result each, in order."""
        self._feed.batch_results(results)

    def terminate(self) -> None:
        """Take no more rows: the Spark job that feeds this node ends early."""
        self._feed.terminate()


def hdfs_path(ctx: Any, path: str) -> str:
    """Return `path` as a URL on the default file system.

    A path with a scheme, whichever, is returned as it is. A relative path is in the user's home,
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
