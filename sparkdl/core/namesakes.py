"""Names of other packages that are imported as `sparkdl`, and what to use instead.

Runs in: anywhere

Databricks' Deep Learning Pipelines and HorovodRunner, and the package `sparkdl` on PyPI. Their
files may lie in the same folder as these: docs/deployment.md.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

_SCORE = "sparkdl.KerasEstimator and its KerasModel, or sparkdl.TFModel, score a DataFrame"
_IMAGES = "Spark reads images itself: spark.read.format('image') or format('binaryFile')"
_HOROVOD = "call sparkdl.horovod.spark.run(train, kwargs={…}, num_proc=2) (docs/horovod.md)"
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
    "horovod.runner_base": _HOROVOD,
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
_FOLDERS = ("transformers", "graph", "xgboost", "image")


def advise(name: str) -> None:
    """Raise for a name of a namesake's; do nothing for others.

    Raises:
        RemovedModuleError: an ImportError, because `from sparkdl import name` keeps its message.
    """
    known = name
    while known and known not in ADVICE:
        known = known.rpartition(".")[0]
    if known:
        from sparkdl.core.errors import RemovedModuleError  # not at each `import sparkdl`

        raise RemovedModuleError(
            f"sparkdl.{name} belongs to another package that is imported as sparkdl (Databricks' "
            f"Deep Learning Pipelines or HorovodRunner), and this one is sparkdl-cluster: "
            f"{ADVICE[known]}"
        )


class NamesakeModules:
    """A finder that says what to use instead of a namesake's module; asked after all others."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        """Raise for a namesake's module; leave others to the usual error."""
        if fullname.startswith("sparkdl."):
            advise(fullname.removeprefix("sparkdl."))


def mixed_with(folder: str) -> list[str]:
    """Return the folders of a namesake that lie in the folder of this package."""
    return [name for name in _FOLDERS if os.path.isdir(os.path.join(folder, name))]
