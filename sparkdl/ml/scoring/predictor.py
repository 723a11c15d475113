"""A loaded model, whatever made it; each Python worker keeps one for its next partitions.

Runs in: feeder, child. Also in the process that describes a model to the driver.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparkdl.core.errors import InferenceError
from sparkdl.core.garbage import uncollected
from sparkdl.feed.values.ndarrays import Array
from sparkdl.ml.estimators.source import TORCH, ModelSource, Signature


class Predictor:
    """A loaded model.

    Args:
        run: from the inputs to all outputs, by name, as the framework has them.
        to_values: from one output to an array of numpy.

    Attributes:
        signature: its inputs and outputs.
    """

    def __init__(
        self,
        signature: Signature,
        run: Callable[[Mapping[str, Array]], Mapping[str, Any]],
        to_values: Callable[[Any], Any],
    ) -> None:
        self.signature = signature
        self._run = run
        self._to_values = to_values

    def __call__(
        self, inputs: Mapping[str, Array], wanted: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Return outputs for some rows.

        Args:
            inputs: by name, of the dtype and shape of the signature; text as objects.
            wanted: which outputs; None for all.

        Raises:
            InferenceError: if the model gives no such output.
        """
        found = self._run(inputs)
        names = list(found) if wanted is None else wanted
        if unknown := [name for name in names if name not in found]:
            raise InferenceError(
                f"the model gave no output {', '.join(map(repr, unknown))}, but "
                f"{', '.join(map(repr, found))}"
            )
        return {name: self._to_values(found[name]) for name in names}


_held: dict[ModelSource, Predictor] = {}
"""The one model of this process: Spark gives its Python workers no other place to keep one."""


def predictor(source: ModelSource) -> Predictor:
    """Return the model, loaded if it is not the one that this process holds; another is let go."""
    if source not in _held:
        if _held:
            _held.clear()
            gc.unfreeze()
            gc.collect()
        with uncollected():
            _held[replace(source, content=None)] = load(source)
        # Spark's workers collect garbage after each task: half a second for a framework's objects,
        # unless these are frozen. To look for garbage among them first takes as long, and finds
        # next to nothing.
        gc.freeze()
    return _held[source]


def load(source: ModelSource) -> Predictor:
    """Load a model with what it takes.

    Raises:
        ConfigError: if it is of no kind that can be used; it says what to change.
    """
    if source.format == "function":
        from sparkdl.ml.scoring.function import load_function

        return load_function(source)
    if source.format in TORCH:
        from sparkdl.ml.scoring.torch import load_torch

        return load_torch(source)
    from sparkdl.ml.scoring.tensorflow import load_tensorflow

    return load_tensorflow(source)
