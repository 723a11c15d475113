"""Horovod's API for TensorFlow: `import sparkdl.horovod.tensorflow as hvd`. See docs/horovod.md.

Runs in: child
"""

from __future__ import annotations

import functools
import sys

from sparkdl.core.namesakes import missing_name
from sparkdl.horovod.common import basics, compression, elastic
from sparkdl.horovod.common.basics import *  # noqa: F403 (what all faces have)
from sparkdl.horovod.tensorflow import functions, mpi_ops
from sparkdl.horovod.tensorflow.functions import *  # noqa: F403 (all of it)
from sparkdl.horovod.tensorflow.gradients import DistributedGradientTape
from sparkdl.horovod.tensorflow.mpi_ops import *  # noqa: F403 (all of it)
from sparkdl.horovod.tensorflow.optimizer import DistributedOptimizer

__all__ = [
    *basics.__all__,
    *functions.__all__,
    *mpi_ops.OPERATIONS,
    "DistributedGradientTape",
    "DistributedOptimizer",
    "elastic",
]

# Where Horovod's programs import them from.
sys.modules |= {f"{__name__}.elastic": elastic, f"{__name__}.compression": compression}
__getattr__ = functools.partial(missing_name, __name__)
