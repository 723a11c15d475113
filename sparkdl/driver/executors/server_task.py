"""Handing a query's micro-batches over from a Spark Connect server to its client.

Runs in: anywhere. It is a Python process of the server, where `foreachBatch` calls its function.
The class is pickled by value and needs nothing but Python: the host need not have sparkdl.
"""

from __future__ import annotations

import threading
import time
from typing import Any

LOOK_S = 0.05
STOPPED = "the nodes take no more micro-batches of this query"
SILENT_S = 60.0
"""How long the client may say nothing: it has ended then, or cannot reach the server."""


class HandOver:
    """Shows each micro-batch to the client as a view, and waits until the nodes have it.

    Client and server communicate by settings of their common session, the only channel that every
    client has. The micro-batch is of a copy of that session, since Spark 4.3, so its view is one of
    all sessions.

    Args:
        spark: the client's session, which is pickled by its name.
        name: prefix of the views and settings. `name.ready` is the latest micro-batch; `name.said`
            is the last one at the nodes, or `stop`, with a number that changes each second.
    """

    def __init__(self, spark: Any, name: str) -> None:
        self.spark = spark
        self.name = name

    def __call__(self, data: Any, batch_id: int) -> None:
        """Return once the nodes have the rows.

        Raises:
            RuntimeError: if the nodes take no more; Spark then does not commit the micro-batch.
            TimeoutError: if the client is gone.
        """
        conf = self.spark.conf
        data.createOrReplaceGlobalTempView(f"{self.name}_{batch_id}")
        conf.set(f"{self.name}.ready", str(batch_id))
        last, end_s = None, time.monotonic() + SILENT_S
        try:
            while True:
                said = conf.get(f"{self.name}.said", "")
                if said.startswith(f"{batch_id} "):
                    return
                if said.startswith("stop "):
                    raise RuntimeError(STOPPED)
                if said != last:
                    last, end_s = said, time.monotonic() + SILENT_S
                elif time.monotonic() > end_s:
                    raise TimeoutError(f"the client has said nothing for {SILENT_S:g} s")
                threading.Event().wait(LOOK_S)
        finally:
            # A global view outlives the session, and nothing else removes it.
            data.sparkSession.catalog.dropGlobalTempView(f"{self.name}_{batch_id}")
