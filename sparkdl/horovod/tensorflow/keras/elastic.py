"""`hvd.elastic` for `tf.keras`: a model's state, and the callbacks that keep it.

Runs in: child

The callbacks are classes of Keras, which is imported on first use. See `elastic_parts`.
"""

from __future__ import annotations

from typing import Any

from sparkdl.horovod.common.elastic import ObjectState, State
from sparkdl.horovod.keras.making import classes
from sparkdl.horovod.tensorflow.elastic import TensorFlowKerasState, run

KerasState = TensorFlowKerasState

__all__ = ["KerasState", "ObjectState", "State", "run"]


def __getattr__(name: str) -> Any:
    if not name.startswith("_") and (found := classes("tf.keras").get(name)):
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
