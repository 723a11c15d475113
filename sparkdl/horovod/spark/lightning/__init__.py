"""`import sparkdl.horovod.spark.lightning`: Horovod's estimator for PyTorch Lightning.

Runs in: driver, child

https://github.com/horovod/horovod/blob/v0.28.1/horovod/spark/lightning/estimator.py
"""

from __future__ import annotations

from functools import partial

from sparkdl.core.namesakes import missing_name
from sparkdl.horovod.spark.lightning.estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
__getattr__ = partial(missing_name, __name__)
