"""A Keras model takes values by the names of its inputs, whether they were named or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparkdl.ml.estimators.keras_model import as_inputs, inputs_of

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize("kind", ["live", "loaded", "named", "dict", "nested"])
def test_values_reach_the_inputs_that_they_are_named_for(kind: str) -> None:
    import keras

    names = {"named": ("a", "b"), "dict": ("z", "y")}.get(kind, (None, None))
    left, right = (keras.Input((1,), name=name) for name in names)
    structure: Any = {"dict": {"z": left, "y": right}, "nested": [{"z": left}, [right]]}
    output = keras.layers.Subtract()([left, right])
    model = keras.Model(structure.get(kind, [left, right]), output)
    if kind == "loaded":
        model = keras.models.model_from_json(model.to_json())
    by_name = {tensor.name: tensor for tensor in inputs_of(model)}
    places = {id(tensor): name for tensor, name in zip(model.inputs, by_name, strict=True)}
    minuend = places.get(id(left), next(iter(by_name)))
    values = {name: np.full((2, 1), 3.0 if name == minuend else 1.0) for name in by_name}
    found = model.predict(as_inputs(model, values), verbose=0)
    np.testing.assert_array_equal(found, np.full((2, 1), 2.0))
