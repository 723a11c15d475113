"""`import sparkdl.horovod.spark.torch`: Horovod's estimator for PyTorch.

Runs in: driver

https://github.com/horovod/horovod/blob/v0.28.1/horovod/spark/torch/estimator.py
"""

from __future__ import annotations

from functools import partial

from sparkdl.core.namesakes import missing_name
from sparkdl.horovod.spark.torch.estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
__getattr__ = partial(missing_name, __name__)
