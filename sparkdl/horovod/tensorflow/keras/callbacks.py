"""Horovod's callbacks for `tf.keras`, whichever Keras that is; see `horovod.keras.callbacks`."""

from __future__ import annotations

import functools

from sparkdl.horovod.keras.callbacks import callback_named

__getattr__ = functools.partial(callback_named, "tf.keras")
