"""Horovod's API for tf.keras: `import sparkdl.horovod.tensorflow.keras as hvd`.

See docs/horovod.md.

Runs in: child
"""

from __future__ import annotations

import functools

from sparkdl.horovod.common import face
from sparkdl.horovod.common.face import *  # noqa: F403 (what all faces have)
from sparkdl.horovod.keras.loading import load
from sparkdl.horovod.tensorflow.compression import Compression
from sparkdl.horovod.tensorflow.functions import (
    allgather_object,
    barrier,
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
    join,
)
from sparkdl.horovod.tensorflow.keras import callbacks, elastic
from sparkdl.horovod.tensorflow.ops import allgather, broadcast
from sparkdl.horovod.tensorflow.optimizer import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
)
from sparkdl.horovod.tensorflow.reductions import allreduce, reducescatter

load_model = functools.partial(load, "tf.keras")
"""See `sparkdl.horovod.keras.loading.load`."""

__all__ = [
    *face.__all__,
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "join",
    "load_model",
    "reducescatter",
]
