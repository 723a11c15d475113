"""Names of other packages that are imported as `sparkdl`, and what to use instead.

Runs in: anywhere

Databricks' Deep Learning Pipelines and HorovodRunner, and the package `sparkdl` on PyPI. Their
files may lie in the same folder as these: docs/deployment.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_SCORE = "sparkdl.KerasEstimator and its KerasModel, or sparkdl.TFModel, score a DataFrame"
_IMAGES = "Spark reads images itself: spark.read.format('image') or format('binaryFile')"
_HOROVOD = "call sparkdl.horovod.spark.run(train, kwargs={…}, num_proc=2) (docs/horovod.md)"
_TFOS = "its modules are in sparkdl.tfos: from sparkdl.tfos import TFCluster"
ADVICE = {
    "DeepImageFeaturizer": _SCORE,
    "DeepImagePredictor": _SCORE,
    "HorovodRunner": _HOROVOD,
    "KerasImageFileEstimator": "use sparkdl.KerasEstimator (docs/spark-ml.md)",
    "KerasImageFileTransformer": _SCORE,
    "KerasTransformer": _SCORE,
    "TFImageTransformer": _SCORE,
    "TFInputGraph": _SCORE,
    "TFTransformer": _SCORE,
    "TextEstimator": "use sparkdl.KerasEstimator (docs/spark-ml.md)",
    "estimators": "use sparkdl.KerasEstimator (docs/spark-ml.md)",
    "graph": _SCORE,
    "horovod.log_to_driver": "print in the function: sparkdl.horovod.spark.run prints the lines of "
    "all processes, sparkdl.launch and sparkdl.run do so with log_to_driver=True",
    "horovod.runner_base": _HOROVOD,
    "horovod.tensorflow.keras.LogCallback": "call ctx.report(step, loss=…) in a callback of your "
    "own, in a function that sparkdl.launch or sparkdl.run starts (docs/tracking.md)",
    "image": _IMAGES,
    "imageInputPlaceholder": _SCORE,
    "imageSchema": _IMAGES,
    "imageType": _IMAGES,
    "readImages": _IMAGES,
    "transformers": _SCORE,
    "udf": _SCORE,
    "xgboost": "use xgboost.spark, of the package xgboost",
}
"""By name of an attribute or module. What is said of a package holds for its modules."""
_OF_OTHERS = {
    "DeepspeedTorchDistributor": (
        "pyspark.ml.deepspeed",
        "run a function that calls deepspeed.initialize by sparkdl.TorchDistributor, or shard by "
        "FSDP2 as ZeRO does (docs/pytorch.md)",
    ),
    "MirroredStrategyRunner": (
        "spark_tensorflow_distributor",
        "run a function that trains under MultiWorkerMirroredStrategy by sparkdl.run(spark, "
        "train, args, nodes=2)",
    ),
    "TFCluster": ("TensorFlowOnSpark", _TFOS),
    "TFNode": ("TensorFlowOnSpark", _TFOS),
    "TFParallel": ("TensorFlowOnSpark", _TFOS),
}
"""Names that people look for here: their home, and what to use instead."""


def advise(name: str) -> None:
    """Raise for a name of a namesake's; do nothing for others.

    Raises:
        RemovedModuleError: an ImportError, because `from sparkdl import name` keeps its message.
    """
    if name in _OF_OTHERS:
        home, advice = _OF_OTHERS[name]
        raise _removed(f"sparkdl has no {name}, which is {home}'s: {advice}")
    known = name
    while known and known not in ADVICE:
        known = known.rpartition(".")[0]
    if known:
        raise _removed(
            f"sparkdl.{name} belongs to another package that is imported as sparkdl (Databricks' "
            f"Deep Learning Pipelines or HorovodRunner), and this one is sparkdl-cluster: "
            f"{ADVICE[known]}"
        )


def _removed(text: str) -> ImportError:
    from sparkdl.core.errors import RemovedModuleError  # not at each `import sparkdl`

    return RemovedModuleError(text)


class NamesakeModules:
    """A finder that says what to use instead of a namesake's module; asked after all others."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        """Raise for a namesake's module; leave others to the usual error."""
        if fullname.startswith("sparkdl."):
            advise(fullname.removeprefix("sparkdl."))
