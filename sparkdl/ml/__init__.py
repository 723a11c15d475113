"""Spark ML: estimators that train on a cluster of nodes, models that score in Spark's own tasks.

Runs in: driver
"""

from __future__ import annotations

import sys

# Spark ML imports a saved stage by its module. Stages now say `sparkdl.TFModel`; those that were
# saved earlier name these modules, in whose place `sparkdl` itself has the classes.
for _former in ("model", "estimator", "keras_estimator"):
    sys.modules[f"{__name__}.{_former}"] = sys.modules["sparkdl"]
