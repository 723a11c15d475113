"""Hyper-parameter search with Optuna: trials in parallel over sub-clusters.

Runs in: driver
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkdl.ml.tuning.study import search, search_estimator

__all__ = ["search", "search_estimator"]


def __getattr__(name: str) -> Any:
    # Late, for Spark's tasks import modules of this package and need little of it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("sparkdl.ml.tuning.study"), name)
