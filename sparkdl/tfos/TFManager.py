"""TensorFlowOnSpark's `TFManager`: queues to try out a `map_fun` with, without Spark.

Nodes of a cluster need no manager. This one is for a program's own tests: put rows into
`start(…).get_queue("input")`, and read them with `TFNode.DataFeed`.
https://github.com/yahoo/TensorFlowOnSpark/blob/v2.2.5/tensorflowonspark/TFManager.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from queue import Queue
from typing import Any, NoReturn

from sparkdl.core.errors import ConfigError, RemovedError
from sparkdl.tfos.marker import EndPartition

__all__ = ["TFManager", "connect", "start"]


class TFManager:
    """Queues and values of this process.

    Args:
        queues: their names.
    """

    def __init__(self, queues: Sequence[str]) -> None:
        self._queues: dict[str, Queue[Any]] = {name: Queue() for name in queues}
        self._values: dict[str, Any] = {"state": "running"}

    def get_queue(self, qname: str) -> Queue[Any]:
        """Return the queue called `qname`.

        Raises:
            ConfigError: if there is none.
        """
        if qname not in self._queues:
            raise ConfigError(f"there is no queue {qname!r}; choose one of {list(self._queues)}")
        return self._queues[qname]

    def get(self, key: str) -> Any:
        """Return the value that was set, or `None`."""
        return self._values.get(key)

    def set(self, key: str, value: Any) -> None:
        """Keep a value. `state` is `running`, or `terminating` after `DataFeed.terminate`."""
        self._values[key] = value

    def data_feed(
        self,
        train_mode: bool,
        qname_in: str,
        qname_out: str,
        input_mapping: Mapping[str, str] | None,
    ) -> _QueueFeed:
        """Return the feed over two of the queues."""
        tensors = [tensor for _, tensor in sorted((input_mapping or {}).items())]
        results = None if train_mode else self.get_queue(qname_out)
        return _QueueFeed(self, self.get_queue(qname_in), results, tensors)


class _QueueFeed:
    """Rows from one queue, results into another.

    `None` in the queue is the end of the feed, `marker.EndPartition` that of a partition.
    """

    def __init__(
        self, mgr: TFManager, rows: Queue[Any], results: Queue[Any] | None, tensors: list[str]
    ) -> None:
        self.done_feeding = False
        self._mgr, self._rows, self._results, self._tensors = mgr, rows, results, tensors

    def next_batch(self, batch_size: int) -> Any:
        """Return up to `batch_size` rows, see `TFNode.DataFeed.next_batch`."""
        rows: list[Any] = []
        while len(rows) < batch_size and not self.done_feeding:
            row = self._get()
            if row is None:
                self.done_feeding = True
            elif not isinstance(row, EndPartition):
                rows.append(row)
            elif rows and self._results is not None:
                break
        if not self._tensors:
            return rows
        return {tensor: [row[i] for row in rows] for i, tensor in enumerate(self._tensors)}

    def batch_results(self, results: Sequence[Any]) -> None:
        """Put each result into the queue of results."""
        if self._results is None:
            raise ConfigError("batch_results needs a DataFeed with train_mode=False")
        for result in results:
            self._results.put(result)

    def terminate(self) -> None:
        """Discard the queue's items."""
        self._mgr.set("state", "terminating")
        while not self._rows.empty():
            self._get()

    def _get(self) -> Any:
        row = self._rows.get()
        # So that a test may wait by `queue.join()`, as TensorFlowOnSpark's feeders did.
        self._rows.task_done()
        return row


def start(authkey: bytes, queues: Sequence[str], mode: str = "local") -> TFManager:
    """Return a manager with queues of these names.

    Args:
        authkey, mode: accepted for TensorFlowOnSpark's sake: nothing listens.
    """
    return TFManager(queues)


def connect(address: Any, authkey: bytes) -> NoReturn:
    """Raise `RemovedError`: a node has no manager that others connect to."""
    raise RemovedError(
        "TFManager.connect: nodes have no manager that others connect to. Feed them with "
        "cluster.train or cluster.inference, and end them with cluster.shutdown()"
    )
