"""TensorFlowOnSpark's `TFNodeContext`, for runs of `TFParallel` and for a program's own tests.

Runs in: child

In a cluster `map_fun` is given a `sparkdl.NodeContext`, which has all of this and more.
https://github.com/yahoo/TensorFlowOnSpark/blob/v2.2.5/tensorflowonspark/TFSparkNode.py
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

from sparkdl.core.errors import ConfigError
from sparkdl.core.spec import DEFAULT_FEED
from sparkdl.node.legacy import LegacyContext
from sparkdl.tfos import TFNode

__all__ = ["TFNodeContext"]

_TRAINERS = ("master", "chief", "worker")


class TFNodeContext(LegacyContext):
    """A node's place in a cluster.

    Args:
        cluster_spec: `{job: ["host:port", …]}`.
        mgr: what `get_data_feed` reads from: `TFManager.start(…)` in a test.
        tmp_socket: holds the node's port until `release_port`.
    """

    def __init__(
        self,
        executor_id: int = 0,
        job_name: str = "",
        task_index: int = 0,
        cluster_spec: Mapping[str, Sequence[str]] | None = None,
        defaultFS: str = "file://",
        working_dir: str = ".",
        mgr: Any = None,
        tmp_socket: socket.socket | None = None,
    ) -> None:
        spec = cluster_spec or {}
        num_workers = sum(len(spec.get(job, ())) for job in _TRAINERS)
        place = (executor_id, job_name, task_index, spec, num_workers)
        super().__init__(*place, defaultFS, working_dir, mgr, tmp_socket)

    def get_data_feed(  # type: ignore[override]
        self,
        train_mode: bool = True,
        qname_in: str = DEFAULT_FEED,
        qname_out: str = "output",
        input_mapping: Mapping[str, str] | None = None,
    ) -> TFNode.DataFeed:
        """Return the feed that `mgr` has.

        Raises:
            ConfigError: if there is no `mgr`: nothing feeds this run.
        """
        if self.mgr is None:
            raise ConfigError(
                "nothing feeds this run: TFParallel runs read their own data, and a TFNodeContext "
                "of a test needs mgr=TFManager.start(b'', ['input', 'output'])"
            )
        return TFNode.DataFeed(self.mgr, train_mode, qname_in, qname_out, input_mapping)
