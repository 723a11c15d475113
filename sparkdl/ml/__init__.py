"""Spark ML: estimators that train on a cluster of nodes, models that score in Spark's own tasks.

Runs in: driver
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkdl.ml.scoring.predict import predict
    from sparkdl.ml.scoring.torch_model import TorchModel

__all__ = ["TorchModel", "predict"]

# Spark ML imports a saved stage by its module. Stages now say `sparkdl.TFModel`; those that were
# saved earlier name these modules, in whose place `sparkdl` itself has the classes.
for _former in ("model", "estimator", "keras_estimator"):
    sys.modules[f"{__name__}.{_former}"] = sys.modules["sparkdl"]


def __getattr__(name: str) -> Any:  # imported on first use, as those of sparkdl itself
    if name == "predict":
        from sparkdl.ml.scoring.predict import predict

        return predict
    if name == "TorchModel":
        from sparkdl.ml.scoring.torch_model import TorchModel

        return TorchModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
