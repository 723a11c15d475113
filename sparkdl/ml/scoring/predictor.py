"""A loaded model, whichever framework runs it, or a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle
import pyarrow as pa

from sparkdl.core.errors import InferenceError, in_words
from sparkdl.core.imports import advice_on_missing
from sparkdl.ml.scoring.columns import OutputColumn
from sparkdl.ml.scoring.share import Share, take_share
from sparkdl.ml.scoring.source import ModelSource, Signature
from sparkdl.values.ndarrays import Array


class RowsFailedError(InferenceError):
    """The model failed on a batch."""


class Predictor:
    """A loaded model.

    Args:
        run: maps the inputs to all outputs, by name, as the framework's tensors.
        to_values: converts one output to a numpy array.
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
        """Return the wanted outputs for some rows; by name, text as objects."""
        found = self._run(inputs)
        names = list(found) if wanted is None else wanted
        if unknown := [name for name in names if name not in found]:
            raise InferenceError(
                f"the model gave no output {', '.join(map(repr, unknown))}, but "
                f"{', '.join(map(repr, found))}"
            )
        # Only the wanted outputs: each costs a copy from the device.
        return {name: self._to_values(found[name]) for name in names}

    def columns(
        self, values: Mapping[str, Array], outputs: Sequence[OutputColumn]
    ) -> list[pa.Array]:
        try:
            rows = len(next(iter(values.values())))
            found = self(values, [output.tensor for output in outputs])
            for name, each in found.items():
                shape = list(each.shape) if hasattr(each, "shape") else [len(each)]
                if shape[:1] != [rows]:
                    raise InferenceError(
                        f"the model's output {name!r} has shape {shape} for {rows} rows; it must "
                        "have one value for each row"
                    )
            return [output.column(found[output.tensor]) for output in outputs]
        # A function of the user's may exit, which would end the worker without a reason.
        except (Exception, SystemExit) as error:
            raise RowsFailedError(in_words(error)) from error


def load_function(source: ModelSource, share: Share | None) -> Predictor:
    """Call `make`, and return the predictor that calls its result with columns."""
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

    return Predictor(Signature((), ()), run, lambda values: values)
