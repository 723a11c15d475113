"""Horovod's API for TensorFlow: `import sparkdl.horovod.tensorflow as hvd`. See docs/horovod.md.

Runs in: child
"""

from __future__ import annotations

import functools
import sys

from sparkdl.core.namesakes import missing_name
from sparkdl.horovod.common import compression, elastic
from sparkdl.horovod.tensorflow import mpi_ops
from sparkdl.horovod.tensorflow.mpi_ops import *  # noqa: F403 (all of it)
from sparkdl.horovod.tensorflow.optimizer import DistributedGradientTape, DistributedOptimizer

__all__ = [*mpi_ops.__all__, "DistributedGradientTape", "DistributedOptimizer", "elastic"]

# Where Horovod's programs import them from.
sys.modules |= {
    f"{__name__}.compression": compression,
    f"{__name__}.elastic": elastic,
    f"{__name__}.functions": mpi_ops,
}
__getattr__ = functools.partial(missing_name, __name__)
