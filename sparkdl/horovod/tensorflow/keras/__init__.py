"""Horovod's API for tf.keras: `import sparkdl.horovod.tensorflow.keras as hvd`.

The same names as in `sparkdl.horovod.keras`, as Horovod has them here. See docs/horovod.md.

Runs in: child
"""

from __future__ import annotations

import functools
from typing import Any

from sparkdl.collectives.transport import Op
from sparkdl.core.namesakes import advise
from sparkdl.horovod.common import Average, ProcessSet, global_process_set
from sparkdl.horovod.common.compression import Compression, Compressor
from sparkdl.horovod.keras import *  # noqa: F403 (all of it, but for what follows)
from sparkdl.horovod.keras import __all__ as __all__
from sparkdl.horovod.keras import load
from sparkdl.horovod.tensorflow import optimizer as _tensorflow
from sparkdl.horovod.tensorflow.gradients import Groups

# In this form, because `from … import callbacks` would find those of Keras 3, imported above.
import sparkdl.horovod.tensorflow.keras.callbacks  # isort: skip
import sparkdl.horovod.tensorflow.keras.elastic  # isort: skip  # noqa: F401


def DistributedOptimizer(  # type: ignore[no-redef]  # noqa: N802, PLR0913 (Horovod's)
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Op | str = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer like this one that reduces gradients over all members.

    See `sparkdl.horovod.tensorflow.DistributedOptimizer`; the order of the arguments is Horovod's.
    """
    return _tensorflow.DistributedOptimizer(
        optimizer,
        name,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        backward_passes_per_step=backward_passes_per_step,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )


load_model = functools.partial(load, "tf.keras")
"""See `sparkdl.horovod.keras.load`."""


def __getattr__(name: str) -> Any:
    advise(f"horovod.tensorflow.keras.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
