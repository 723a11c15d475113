"""Training as Spark jobs: no long-running nodes, no ports; each iteration is a Spark job.

Runs in: driver
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkdl.ml.jobs.fit import fit_in_jobs
    from sparkdl.ml.jobs.loop import JobsResult

__all__ = ["JobsResult", "fit_in_jobs"]


def __getattr__(name: str) -> Any:
    # Imported late: Spark's tasks import modules of this package, and need few of its imports.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("sparkdl.ml.jobs.fit"), name)
