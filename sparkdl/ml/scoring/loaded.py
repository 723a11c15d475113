"""Loads a model of any kind; each Python worker keeps one for its next partitions."""

from __future__ import annotations

import gc
from dataclasses import replace

from sparkdl.core.imports import quick_imports
from sparkdl.ml.scoring.predictor import Predictor, load_function
from sparkdl.ml.scoring.share import Share, task_share
from sparkdl.ml.scoring.source import ModelSource
from sparkdl.ml.scoring.tensorflow import load_tensorflow
from sparkdl.ml.scoring.torch import load_torch

_loaded: dict[ModelSource, Predictor] = {}
"""The one model of this process: Spark gives its Python workers no other place to keep one."""


def load(source: ModelSource, share: Share | None = None) -> Predictor:
    loaders = {"function": load_function, "module": load_torch}
    return loaders.get(source.format, load_tensorflow)(source, share)


def predictor(source: ModelSource) -> Predictor:
    """Return the model, loaded if it is not the one that this process has; another is dropped."""
    if source not in _loaded:
        if _loaded:
            _loaded.clear()
            gc.unfreeze()
            gc.collect()
        with quick_imports():
            # Equal without the content, of which the loaded model has no need any more.
            _loaded[replace(source, content=None)] = load(source, task_share())
        # Spark's workers collect garbage after each task: half a second for a framework's objects,
        # unless these are frozen. To look for garbage among them first takes as long, and finds
        # next to nothing.
        gc.freeze()
    return _loaded[source]
