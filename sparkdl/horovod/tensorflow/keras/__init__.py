"""Horovod's API for tf.keras: `import sparkdl.horovod.tensorflow.keras as hvd`.

The same names as in `sparkdl.horovod.keras`. See docs/horovod.md.

Runs in: child
"""

from __future__ import annotations

import functools

from sparkdl.horovod.keras import *  # noqa: F403 (all of it, but for what follows)
from sparkdl.horovod.keras import __all__ as __all__
from sparkdl.horovod.keras import load

# In this form, because `from … import callbacks` would find those of Keras 3, imported above.
import sparkdl.horovod.tensorflow.keras.callbacks  # isort: skip
import sparkdl.horovod.tensorflow.keras.elastic  # isort: skip  # noqa: F401

load_model = functools.partial(load, "tf.keras")
"""See `sparkdl.horovod.keras.load`."""
