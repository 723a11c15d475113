"""Horovod's callbacks as classes of Keras 3 or tf_keras.

Runs in: child
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

from sparkdl.horovod.keras.callback_parts import (
    BestModel,
    Broadcast,
    MetricAverage,
    Schedule,
    Warmup,
)
from sparkdl.horovod.keras.elastic_parts import CommitState, UpdateBatchState, UpdateEpochState


@functools.cache
def classes(library: str) -> dict[str, type[Any]]:
    """Return the callbacks by name, those of `hvd.elastic` with them.

    Args:
        library: `keras`, or `tf.keras` for the one that TensorFlow has.
    """
    keras = library_named(library)
    callback, checkpoint = keras.callbacks.Callback, keras.callbacks.ModelCheckpoint
    parts: dict[str, tuple[type[Any], type[Any]]] = {
        "BroadcastGlobalVariablesCallback": (Broadcast, callback),
        "MetricAverageCallback": (MetricAverage, callback),
        "LearningRateScheduleCallback": (Schedule, callback),
        "LearningRateWarmupCallback": (Warmup, callback),
        "BestModelCheckpoint": (BestModel, checkpoint),
        "CommitStateCallback": (CommitState, callback),
        "UpdateBatchStateCallback": (UpdateBatchState, callback),
        "UpdateEpochStateCallback": (UpdateEpochState, callback),
    }
    return {name: type(name, bases, {"__doc__": bases[0].__doc__}) for name, bases in parts.items()}


def library_named(name: str) -> Any:
    """Return the module `keras` or `tf.keras`."""
    return import_module("tensorflow").keras if name == "tf.keras" else import_module(name)
