"""`import sparkdl.horovod.spark.keras`: Horovod's estimator for Keras.

Runs in: driver, child

https://github.com/horovod/horovod/blob/v0.28.1/horovod/spark/keras/estimator.py
"""

from __future__ import annotations

from functools import partial

from sparkdl.core.namesakes import missing_name
from sparkdl.horovod.spark.keras.estimator import KerasEstimator, KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
__getattr__ = partial(missing_name, __name__)
