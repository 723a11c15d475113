"""sparkdl: deep learning on a Spark cluster.

Runs in: anywhere

The public names. All are imported on first use: `import sparkdl` starts no JVM and imports no
framework.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparkdl.core.namesakes import NamesakeModules, missing_name
from sparkdl.version import __version__

if TYPE_CHECKING:
    from sparkdl import data, keras, mlflow
    from sparkdl.core import errors
    from sparkdl.core.errors import NodeFailedError, SparkdlError
    from sparkdl.core.failure import Failure
    from sparkdl.core.options import Feeding, Recovery, Roles, Startup
    from sparkdl.diagnosis.doctor import doctor
    from sparkdl.distributors import (
        DeepspeedTorchDistributor,
        MirroredStrategyRunner,
        TorchDistributor,
    )
    from sparkdl.driver.handle import Cluster
    from sparkdl.driver.launch import launch, run
    from sparkdl.driver.options import Observe
    from sparkdl.horovod.runner_base import HorovodRunner
    from sparkdl.ml.estimators.estimator import TFEstimator
    from sparkdl.ml.estimators.keras_estimator import KerasEstimator
    from sparkdl.ml.estimators.torch_estimator import LightningEstimator, TorchEstimator
    from sparkdl.ml.scoring.model import KerasModel, TFModel, TorchModel
    from sparkdl.ml.scoring.predict import predict
    from sparkdl.ml.tuning import search
    from sparkdl.node.context import NodeContext
    from sparkdl.petastorm.spark import make_spark_converter
    from sparkdl.storage.parquet.paths import parquet

_HOMES = {
    "Cluster": "sparkdl.driver.handle",
    "DeepspeedTorchDistributor": "sparkdl.distributors",
    "Failure": "sparkdl.core.failure",
    "Feeding": "sparkdl.core.options",
    "HorovodRunner": "sparkdl.horovod.runner_base",
    "KerasEstimator": "sparkdl.ml.estimators.keras_estimator",
    "KerasModel": "sparkdl.ml.scoring.model",
    "LightningEstimator": "sparkdl.ml.estimators.torch_estimator",
    "MirroredStrategyRunner": "sparkdl.distributors",
    "NodeContext": "sparkdl.node.context",
    "NodeFailedError": "sparkdl.core.errors",
    "Observe": "sparkdl.driver.options",
    "Recovery": "sparkdl.core.options",
    "Roles": "sparkdl.core.options",
    "SparkdlError": "sparkdl.core.errors",
    "Startup": "sparkdl.core.options",
    "TFEstimator": "sparkdl.ml.estimators.estimator",
    "TFModel": "sparkdl.ml.scoring.model",
    "TorchDistributor": "sparkdl.distributors",
    "TorchEstimator": "sparkdl.ml.estimators.torch_estimator",
    "TorchModel": "sparkdl.ml.scoring.model",
    "data": "sparkdl",
    "doctor": "sparkdl.diagnosis.doctor",
    "errors": "sparkdl",
    "keras": "sparkdl",
    "launch": "sparkdl.driver.launch",
    "make_spark_converter": "sparkdl.petastorm.spark",
    "mlflow": "sparkdl",
    "parquet": "sparkdl.storage.parquet.paths",
    "predict": "sparkdl.ml.scoring.predict",
    "run": "sparkdl.driver.launch",
    "search": "sparkdl.ml.tuning",
}

__all__ = [
    "Cluster",
    "DeepspeedTorchDistributor",
    "Failure",
    "Feeding",
    "HorovodRunner",
    "KerasEstimator",
    "KerasModel",
    "LightningEstimator",
    "MirroredStrategyRunner",
    "NodeContext",
    "NodeFailedError",
    "Observe",
    "Recovery",
    "Roles",
    "SparkdlError",
    "Startup",
    "TFEstimator",
    "TFModel",
    "TorchDistributor",
    "TorchEstimator",
    "TorchModel",
    "__version__",
    "data",
    "doctor",
    "errors",
    "keras",
    "launch",
    "make_spark_converter",
    "mlflow",
    "parquet",
    "predict",
    "run",
    "search",
]

if not any(isinstance(finder, NamesakeModules) for finder in sys.meta_path):
    sys.meta_path.append(NamesakeModules())


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        missing_name("sparkdl", name)
    home = import_module(_HOMES[name])
    if name in ("data", "errors", "keras", "mlflow"):
        return import_module(f"{_HOMES[name]}.{name}")
    return getattr(home, name)


def __dir__() -> list[str]:
    return __all__
