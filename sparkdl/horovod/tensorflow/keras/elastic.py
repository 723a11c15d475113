"""`hvd.elastic` for `tf.keras`: a model's state, and the callbacks that keep it.

The callbacks are classes of Keras, which is imported on first use.
"""

from __future__ import annotations

import functools

from sparkdl.horovod.common.elastic import ObjectState, State
from sparkdl.horovod.keras.callbacks import callback_named
from sparkdl.horovod.tensorflow.elastic import TensorFlowKerasState, run

__all__ = ["KerasState", "ObjectState", "State", "run"]

KerasState = TensorFlowKerasState
__getattr__ = functools.partial(callback_named, "tf.keras")
