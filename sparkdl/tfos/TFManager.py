"""TensorFlowOnSpark's `TFManager`: queues to try out a `map_fun` with, without Spark.

Nodes of a cluster need no manager. This one is for a program's own tests: put rows into
`start(…).get_queue("input")`, and read them with `TFNode.DataFeed`.
https://github.com/yahoo/TensorFlowOnSpark/blob/v2.2.5/tensorflowonspark/TFManager.py
"""

from __future__ import annotations

from collections.abc import Sequence
from queue import Queue
from typing import Any, NoReturn

from sparkdl.core.errors import ConfigError, RemovedError

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
