"""A function of the user's as a model: made once in each worker, called with columns."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import cloudpickle

from sparkdl.core.errors import InferenceError
from sparkdl.core.imports import advice_on_missing
from sparkdl.core.settings import ALL_GPUS, EXECUTORS_GPUS
from sparkdl.ml.scoring.predictor import Predictor
from sparkdl.ml.scoring.share import Share
from sparkdl.ml.scoring.source import ModelSource, Signature
from sparkdl.node.gpus import owned_gpus
from sparkdl.values.ndarrays import Array


def load_function(source: ModelSource, share: Share | None) -> Predictor:
    """Call `make`, and return the predictor that calls its result with columns.

    Args:
        share: the cores and GPUs that it may use; None for all.

    Raises:
        InferenceError: if `make` returns no function, or a module is missing here.
    """
    if share is not None:
        take_share(share)
    assert source.content is not None
    try:
        make, names = cloudpickle.loads(source.content)
        fn = make()
    except ModuleNotFoundError as error:
        raise InferenceError(f"{error}. {advice_on_missing(error)}") from error
    if not callable(fn):
        raise InferenceError(
            f"the function that makes the model returned a {type(fn).__name__}, not a function of "
            "columns"
        )

    def run(columns: Mapping[str, Array]) -> dict[str, Any]:
        found = fn(dict(columns))
        if hasattr(found, "keys"):  # a dict, a DataFrame of pandas
            return {str(name): found[name] for name in found.keys()}  # noqa: SIM118
        if len(names) == 1:
            return {names[0]: found}
        raise InferenceError(
            f"the function returned a {type(found).__name__}, and schema= declares several "
            f"columns: return a dict of {', '.join(names)}"
        )

    return Predictor(Signature((), ()), run, lambda values: values, is_waited_for=True)


def take_share(share: Share) -> None:
    """Limit every framework's cores and GPUs to this worker's share.

    Otherwise a framework takes all of them in each of Spark's workers. Other variables that are
    set already stay.
    """
    own = {
        "OMP_NUM_THREADS": str(share.cores),
        "TF_NUM_INTRAOP_THREADS": str(share.cores),
        "TF_NUM_INTEROP_THREADS": "1",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "TQDM_DISABLE": "1",  # a bar for each batch, in an executor's log
    }
    if share.gpus and EXECUTORS_GPUS not in os.environ:
        own["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        # What the executor sees is kept: Spark's next addresses count by it.
        owned = owned_gpus(share.gpus)
        os.environ[EXECUTORS_GPUS] = os.environ.get("CUDA_VISIBLE_DEVICES", ALL_GPUS)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(owned)
    for name, value in own.items():
        # Before `make` runs: libraries read these when they are imported.
        os.environ.setdefault(name, value)
