"""Horovod's API for tf.keras: `import sparkdl.horovod.tensorflow.keras as hvd`.

The same names as in `sparkdl.horovod.keras`, as Horovod has them here. See docs/horovod.md.

Runs in: child
"""

from __future__ import annotations

import functools
from typing import Any

from sparkdl.core.namesakes import missing_name
from sparkdl.horovod.driver_log import Log
from sparkdl.horovod.keras import *  # noqa: F403 (all names, except the ones below)
from sparkdl.horovod.keras import __all__ as __all__
from sparkdl.horovod.keras import in_order, load
from sparkdl.horovod.keras.callbacks import library_named
from sparkdl.horovod.tensorflow import optimizer as _tensorflow

# In this form, because `from … import callbacks` would find those of Keras 3, imported above.
import sparkdl.horovod.tensorflow.keras.callbacks  # isort: skip
import sparkdl.horovod.tensorflow.keras.elastic  # isort: skip  # noqa: F401

DistributedOptimizer = in_order(
    _tensorflow.DistributedOptimizer,
    *("optimizer", "name", "device_dense", "device_sparse", "compression", "sparse_as_dense"),
    *("gradient_predivide_factor", "op", "backward_passes_per_step"),
    *("average_aggregated_gradients", "num_groups", "groups"),
)
load_model = functools.partial(load, "tf.keras")
"""See `sparkdl.horovod.keras.load`."""


def __getattr__(name: str) -> Any:
    if name == "LogCallback":  # of Databricks' sparkdl, see `horovod/driver_log.py`
        return log_callback()
    return missing_name(__name__, name)


@functools.cache
def log_callback() -> type[Any]:
    """Return `Log` as a callback of `tf.keras`, which is imported now."""
    return type("LogCallback", (Log, library_named("tf.keras").callbacks.Callback), {})
