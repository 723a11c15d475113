"""`sparkdl.horovod.keras` by Horovod's name for `tf.keras`, which is Keras 3.

Databricks' `LogCallback` had its place here.
"""

from __future__ import annotations

import sys

from sparkdl.horovod import keras
from sparkdl.horovod.common import elastic
from sparkdl.horovod.keras import *  # noqa: F403 (for type checkers; the module is that one)
from sparkdl.horovod.keras import callbacks

sys.modules |= {__name__: keras, f"{__name__}.callbacks": callbacks, f"{__name__}.elastic": elastic}
