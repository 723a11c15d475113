"""Experiments in MLflow: `sparkdl.mlflow.autolog()`, and each training is a run. docs/tracking.md.

Runs in: driver. `_load_pyfunc`: anywhere.
"""

from __future__ import annotations

from pathlib import Path

from sparkdl.ml.scoring.frames import FrameScorer
from sparkdl.mlflow.tracker import autolog, flush

__all__ = ["autolog", "flush"]


def _load_pyfunc(path: str) -> FrameScorer:
    """Return what MLflow calls `predict` of; it finds this function by its name."""
    return FrameScorer.load(Path(path))
