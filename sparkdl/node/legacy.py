"""The members of TensorFlowOnSpark's `TFNodeContext` that `ctx` offers to programs written for it.

https://github.com/yahoo/TensorFlowOnSpark/blob/v2.2.5/tensorflowonspark/TFSparkNode.py
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from sparkdl.core.errors import ConfigError, RemovedError
from sparkdl.core.files import absolute_url
from sparkdl.core.spec import DEFAULT_FEED
from sparkdl.datasets.tfos import DataFeed
from sparkdl.node.link import AgentLink

_log = logging.getLogger(__name__)


class NodeManager:
    """`ctx.mgr`: what `TFNode.DataFeed(ctx.mgr)` reads from, and a node's own few values.

    Its values are those of this process; `state` is `running`.
    """

    def __init__(self, link: AgentLink, has_order: bool = False) -> None:
        self._link, self._has_order = link, has_order
        self._values: dict[str, Any] = {"state": "running"}

    def data_feed(
        self,
        train_mode: bool,
        qname_in: str,
        qname_out: str,
        input_mapping: Mapping[str, str] | None,
    ) -> DataFeed:
        """Return the feed, see `LegacyContext.get_data_feed`."""
        if self._has_order:
            raise ConfigError(
                "ctx.get_data_feed has no Feeding(global_batch_size=…): use ctx.batches()"
            )
        reader = self._link.feeds.reader(qname_in)
        return DataFeed(reader, self._link.send, train_mode, input_mapping)

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def set(self, key: str, value: Any) -> None:
        """Keep a value for this node."""
        self._values[key] = value

    def get_queue(self, qname: str) -> NoReturn:
        """Refuse: rows come through the feed.

        Raises:
            RemovedError: always.
        """
        raise RemovedError(
            f"ctx.mgr.get_queue({qname!r}): rows do not travel through a manager's queues. Read "
            f"them with ctx.get_data_feed(qname_in={qname!r}), or ctx.batches and ctx.dataset"
        )


class RemovedCalls:
    """The methods of TensorFlowOnSpark's context that TensorFlow 2 has no use for."""

    def start_cluster_server(self, num_gpus: int = 1, rdma: bool = False) -> NoReturn:
        """Refuse: it is TensorFlow 1's.

        Raises:
            RemovedError: always; says what to write instead.
        """
        raise RemovedError(
            "start_cluster_server starts a server for sessions of TensorFlow 1. With TensorFlow 2 "
            "leave it out: create tf.distribute.MultiWorkerMirroredStrategy() in map_fun. For that "
            "TF_CONFIG is set, and build the model in its scope"
        )

    def export_saved_model(
        self, sess: Any = None, export_dir: str = "", tag_set: str = "", signatures: Any = None
    ) -> NoReturn:
        """Refuse: it is TensorFlow 1's.

        Raises:
            RemovedError: always; says what to write instead.
        """
        raise RemovedError(
            "export_saved_model takes a session of TensorFlow 1. With TensorFlow 2 write "
            "compat.export_saved_model(model, export_dir, ctx.job_name == 'chief') on all nodes, "
            "with `from sparkdl.tfos import compat`"
        )


class LegacyContext(RemovedCalls):
    """A node's place in the cluster.

    Attributes:
        executor_id: this node's number; `worker_num` is its old name.
        job_name: `chief`, `worker`, `ps` or `evaluator`.
        task_index: the node's index among those with the same job name.
        cluster_spec: TensorFlow's: `{job: ["host:port", …]}`.
        num_workers: nodes that train: chief and workers.
        defaultFS: Hadoop's default file system.
        working_dir: the driver's working directory.
        mgr: what `get_data_feed` reads from.
        tmp_socket: holds the node's port until `release_port`.
    """

    def __init__(  # noqa: PLR0913 (what TensorFlowOnSpark has)
        self,
        executor_id: int,
        job_name: str,
        task_index: int,
        cluster_spec: Mapping[str, Sequence[str]],
        num_workers: int,
        defaultFS: str,  # noqa: N803 (its name in TensorFlowOnSpark)
        working_dir: str,
        mgr: Any,
        tmp_socket: socket.socket | None,
    ) -> None:
        self.executor_id = self.worker_num = executor_id
        self.job_name = job_name
        self.task_index = task_index
        self.cluster_spec = dict(cluster_spec)
        self.num_workers = num_workers
        self.defaultFS = defaultFS
        self.working_dir = working_dir
        self.mgr = mgr
        self.tmp_socket = tmp_socket

    def get_data_feed(
        self,
        train_mode: bool = True,
        qname_in: str = DEFAULT_FEED,
        qname_out: str = "output",
        input_mapping: Mapping[str, str] | None = None,
    ) -> DataFeed:
        """Return TensorFlowOnSpark's `DataFeed` over the feed called `qname_in`.

        Args:
            train_mode: `False` to answer `cluster.inference` with `batch_results`.
            qname_out: has no effect: results go back where the rows came from.
            input_mapping: column name to tensor name.
        """
        feed: DataFeed = self.mgr.data_feed(train_mode, qname_in, qname_out, input_mapping)
        return feed

    def absolute_path(self, path: str) -> str:
        """Return `path` as a URL on the default file system, relative to the user's home there.

        On a local default file system it is relative to the driver's working directory. A path
        with a scheme is returned as it is.
        """
        return absolute_url(path, self.defaultFS, self.working_dir)

    def release_port(self) -> None:
        """Close the socket that holds this node's port, so that a server can bind it."""
        if self.tmp_socket is None:
            _log.warning(
                "There is no port to release, or it has been released already: call "
                "release_port() once"
            )
            return
        self.tmp_socket.close()
        self.tmp_socket = None
