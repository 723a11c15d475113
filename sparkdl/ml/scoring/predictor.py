"""A loaded model, whichever framework runs it.

Runs in: feeder, child. Also in the process that describes a model to the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparkdl.core.errors import InferenceError
from sparkdl.ml.scoring.source import Signature
from sparkdl.values.ndarrays import Array


class RowsFailedError(InferenceError):
    """The model failed on rows `start` to before `stop` of the task's piece `number`."""

    def __init__(self, text: str, number: int, start: int, stop: int) -> None:
        super().__init__(text)
        self.number = number
        self.start = start
        self.stop = stop


class Predictor:
    """A loaded model.

    Args:
        run: maps the inputs to all outputs, by name, as the framework's tensors.
        to_values: converts one output to a numpy array.

    Attributes:
        signature: its inputs and outputs.
        is_waited_for: whether a call may wait for something other than this process's core: a GPU,
            or a service that the user's function calls.
    """

    def __init__(
        self,
        signature: Signature,
        run: Callable[[Mapping[str, Array]], Mapping[str, Any]],
        to_values: Callable[[Any], Any],
        is_waited_for: bool = False,
    ) -> None:
        self.signature = signature
        self.is_waited_for = is_waited_for
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
        # Only the wanted outputs: each costs a copy from the device.
        return {name: self._to_values(found[name]) for name in names}


def check_rows(found: Mapping[str, Any], rows: int) -> None:
    """Check that outputs have one value for each row.

    Raises:
        InferenceError: if they have not.
    """
    for name, values in found.items():
        shape = list(values.shape) if hasattr(values, "shape") else [len(values)]
        if shape[:1] != [rows]:
            raise InferenceError(
                f"the model's output {name!r} has shape {shape} for {rows} rows; it must have one "
                "value for each row"
            )
