"""Rows of a linear function in a store, and backends: this process, and the nodes of a lab.

Runs in: the process of pytest
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkdl.horovod.spark.common.backend import Backend
from sparkdl.horovod.spark.common.store import FilesystemStore
from sparkdl.node.context import NodeContext
from tests.doubles.labs import Lab
from tests.horovod.together import together

ROWS = 40
WEIGHTS = np.array([2.0, -1.0])


class InThisProcess(Backend):
    """Calls the function here, as a user's own backend does elsewhere."""

    def run(
        self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, env: Any = None
    ) -> list[Any]:
        """See `Backend.run`."""
        return [fn(*args, **(kwargs or {}))]

    def num_processes(self) -> int:
        """See `Backend.num_processes`."""
        return 1


@dataclass(frozen=True)
class InLab(Backend):
    """Calls the function on the nodes of a lab."""

    lab: Lab

    def run(
        self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, env: Any = None
    ) -> list[Any]:
        """See `Backend.run`."""
        return together(self.lab, _Call(partial(fn, *args, **(kwargs or {}))))

    def num_processes(self) -> int:
        """See `Backend.num_processes`."""
        return self.lab.size


@dataclass(frozen=True)
class _Call:
    function: Callable[[], Any]

    def __call__(self, args: Any, ctx: NodeContext) -> Any:
        return self.function()


def fill(store: FilesystemStore, folder: Path) -> FilesystemStore:
    """Write rows into a store, as `fit` leaves them: a vector, a label, a weight."""
    x = np.random.default_rng(0).normal(size=(ROWS, 2))
    vectors = pa.array(list(x), pa.list_(pa.float64()))
    table = pa.table({"x": vectors, "y": x @ WEIGHTS, "w": np.ones(ROWS)})
    pq.write_table(table, folder / "part.parquet")
    for path in (store.get_train_data_path(), store.get_val_data_path()):
        store.upload(folder / "part.parquet", f"{path}/part.parquet")
    return store
