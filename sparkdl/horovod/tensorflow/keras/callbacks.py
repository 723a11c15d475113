"""Horovod's callbacks for `tf.keras`, whichever Keras that is.

Runs in: child

They are classes of Keras, which is imported on first use. See `callback_parts`.
"""

from __future__ import annotations

from typing import Any

from sparkdl.horovod.keras.making import classes


def __getattr__(name: str) -> Any:
    if not name.startswith("_") and (found := classes("tf.keras").get(name)):
        return found
    raise AttributeError(
        f"module 'sparkdl.horovod.tensorflow.keras.callbacks' has no attribute {name!r}"
    )
