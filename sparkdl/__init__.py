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
from sparkdl.version import __version__ as __version__

if TYPE_CHECKING:
    from sparkdl import data as data, keras as keras, mlflow as mlflow
    from sparkdl.core import errors as errors
    from sparkdl.core.errors import NodeFailedError as NodeFailedError, SparkdlError as SparkdlError
    from sparkdl.core.failure import Failure as Failure
    from sparkdl.core.options import (
        Feeding as Feeding,
        Recovery as Recovery,
        Roles as Roles,
        Startup as Startup,
    )
    from sparkdl.diagnosis.doctor import doctor as doctor
    from sparkdl.distributors import (
        DeepspeedTorchDistributor as DeepspeedTorchDistributor,
        MirroredStrategyRunner as MirroredStrategyRunner,
        TorchDistributor as TorchDistributor,
    )
    from sparkdl.driver.handle import Cluster as Cluster
    from sparkdl.driver.launch import launch as launch, run as run
    from sparkdl.driver.options import Observe as Observe
    from sparkdl.horovod.runner_base import HorovodRunner as HorovodRunner
    from sparkdl.ml.estimators.estimator import TFEstimator as TFEstimator
    from sparkdl.ml.estimators.keras_estimator import KerasEstimator as KerasEstimator
    from sparkdl.ml.estimators.torch_estimator import (
        LightningEstimator as LightningEstimator,
        TorchEstimator as TorchEstimator,
    )
    from sparkdl.ml.estimators.transformers_estimator import (
        TransformersEstimator as TransformersEstimator,
    )
    from sparkdl.ml.scoring.engines import (
        AsyncVLLMEngine as AsyncVLLMEngine,
        TransformersEngine as TransformersEngine,
        VLLMEngine as VLLMEngine,
    )
    from sparkdl.ml.scoring.model import (
        KerasModel as KerasModel,
        TFModel as TFModel,
        TorchModel as TorchModel,
    )
    from sparkdl.ml.scoring.predict import predict as predict
    from sparkdl.ml.tuning import search as search
    from sparkdl.node.context import NodeContext as NodeContext
    from sparkdl.petastorm.spark import make_spark_converter as make_spark_converter
    from sparkdl.storage.parquet.paths import parquet as parquet

_NAMES = {  # by the module that defines them; those of "" are modules
    "": ("data", "errors", "keras", "mlflow"),
    "core.errors": ("NodeFailedError", "SparkdlError"),
    "core.failure": ("Failure",),
    "core.options": ("Feeding", "Recovery", "Roles", "Startup"),
    "diagnosis.doctor": ("doctor",),
    "distributors": ("DeepspeedTorchDistributor", "MirroredStrategyRunner", "TorchDistributor"),
    "driver.handle": ("Cluster",),
    "driver.launch": ("launch", "run"),
    "driver.options": ("Observe",),
    "horovod.runner_base": ("HorovodRunner",),
    "ml.estimators.estimator": ("TFEstimator",),
    "ml.estimators.keras_estimator": ("KerasEstimator",),
    "ml.estimators.torch_estimator": ("LightningEstimator", "TorchEstimator"),
    "ml.estimators.transformers_estimator": ("TransformersEstimator",),
    "ml.scoring.engines": ("AsyncVLLMEngine", "TransformersEngine", "VLLMEngine"),
    "ml.scoring.model": ("KerasModel", "TFModel", "TorchModel"),
    "ml.scoring.predict": ("predict",),
    "ml.tuning": ("search",),
    "node.context": ("NodeContext",),
    "petastorm.spark": ("make_spark_converter",),
    "storage.parquet.paths": ("parquet",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = ["__version__", *_HOMES]

if not any(isinstance(finder, NamesakeModules) for finder in sys.meta_path):
    sys.meta_path.append(NamesakeModules())


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        missing_name("sparkdl", name)
    module = import_module(f"sparkdl.{_HOMES[name] or name}")
    return getattr(module, name) if _HOMES[name] else module


def __dir__() -> list[str]:
    return sorted(__all__)
