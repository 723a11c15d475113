"""A loaded model, whichever framework runs it.

Runs in: feeder, child. Also in the process that describes a model to the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparkdl.core.errors import InferenceError
from sparkdl.feed.values.ndarrays import Array
from sparkdl.ml.estimators.source import Signature


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
