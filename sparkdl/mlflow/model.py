"""A model of an estimator as MLflow's own flavours keep it.

Runs in: driver
"""

from __future__ import annotations

import logging
from typing import Any

from sparkdl.core.scratch import scratch_folder

_log = logging.getLogger(__name__)


def save_model(client: Any, run_id: str, model: Any) -> None:
    """Save a model in a run, as `runs:/<run>/model`.

    Args:
        model: one that an estimator returned.

    Raises:
        Exception: whatever MLflow and the framework raise.
    """
    if not hasattr(model, "getModel"):
        _log.info("The model of %s is a folder of its own, and not in MLflow", model.uid)
        return
    found = model.getModel()
    if any(kind.__module__.startswith("torch.") for kind in type(found).__mro__):
        import mlflow.pytorch as flavour
    else:
        import mlflow.keras as flavour
    with scratch_folder() as scratch:
        folder = str(scratch / "model")
        # Named here: otherwise MLflow loads the model in another process, to see what it imports.
        wanted = flavour.get_default_pip_requirements()
        flavour.save_model(found, folder, pip_requirements=wanted)
        client.log_artifacts(run_id, folder, "model")
