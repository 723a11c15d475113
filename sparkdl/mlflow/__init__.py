"""Experiments in MLflow: `sparkdl.mlflow.autolog()`, and each training is a run. docs/observing.md.

Runs in: driver
"""

from sparkdl.mlflow.tracker import autolog, flush

__all__ = ["autolog", "flush"]
