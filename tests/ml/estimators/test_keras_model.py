"""A Keras model by the names of its inputs and outputs, and how it is made again elsewhere."""

from __future__ import annotations

from typing import Any

import cloudpickle
import numpy as np
import pytest

from sparkdl.core.errors import ConfigError
from sparkdl.ml.estimators.columns import Columns
from sparkdl.ml.estimators.keras_model import (
    Recipe,
    as_config,
    as_file,
    as_inputs,
    code_in,
    from_content,
    inputs_of,
    is_keras_file,
    outputs_of,
)
from sparkdl.ml.estimators.keras_objects import objects_in
from sparkdl.ml.estimators.keras_train import _weight, arranged
from sparkdl.ml.estimators.source import Signature
from sparkdl.ml.jobs.keras import _joined
from sparkdl.ml.scoring.tensorflow import keras_predictor
from tests.ml.models import WIDTH, network

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


def signature_of(model: Any) -> Signature:
    return Signature(inputs_of(model), outputs_of(model))


def own_layer(units: int = 1) -> Any:
    """Make a model with a layer and an activation that Keras does not have."""
    import keras

    class Doubled(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return 2 * x

    x = keras.Input((3,), name="x")
    return keras.Model(x, keras.layers.Dense(units)(Doubled()(x)))


def test_trained_model_of_own_parts_is_made_again_by_its_function() -> None:
    import keras

    recipe = Recipe(own_layer, loss="mse")
    model = recipe.model()
    weights = [np.arange(3.0).reshape(3, 1), np.array([5.0])]
    model.set_weights(weights)
    copy = recipe.copy_of(model)
    assert not copy.compiled
    copy.set_weights(model.get_weights())
    signature = signature_of(copy)
    content = recipe.packed(copy, signature)
    assert not is_keras_file(content)
    keras.layers.Dense(1)  # so that the function's next layer has another number
    found = code_in(content)
    assert found.model().predict(np.ones((1, 3)), verbose=0).tolist() == [[11.0]]
    predictor = keras_predictor(found.model(), found.signature)
    assert predictor.signature.outputs == signature.outputs
    assert list(predictor({"x": np.ones((1, 3), np.float32)})) == [signature.outputs[0].name]


def test_outputs_of_a_dict_keep_their_names_where_the_model_is_made_again() -> None:
    import keras

    def make() -> Any:
        (x,) = own_layer().inputs
        return keras.Model(x, {"z": own_layer(1)(x), "a": own_layer(2)(x)})

    recipe = Recipe(make, loss="mse")
    copy = recipe.copy_of(recipe.model())
    code = code_in(recipe.packed(copy, signature_of(copy)))
    predictor = keras_predictor(code.model(), code.signature)
    found = predictor({"x": np.ones((1, 3), np.float32)})
    assert {name: values.shape for name, values in found.items()} == {"z": (1, 1), "a": (1, 2)}
    shapes = {tensor.name: tensor.shape for tensor in code.signature.outputs}
    assert shapes == {"z": (None, 1), "a": (None, 2)}


def test_trained_model_of_keras_own_parts_is_a_file_whatever_its_loss() -> None:
    def own_loss(y: Any, p: Any) -> Any:
        return (y - p) ** 2

    recipe = Recipe(lambda: network(None), loss=as_config(own_loss), objects=objects_in(own_loss))
    model = recipe.model()
    assert model.loss.__name__ == "own_loss"
    copy = recipe.copy_of(model)
    copy.set_weights(model.get_weights())
    content = recipe.packed(copy, signature_of(copy))
    assert is_keras_file(content)
    x = np.ones((2, WIDTH))
    found = from_content(content).predict(x, verbose=0)
    np.testing.assert_allclose(found, model.predict(x, verbose=0))


def test_file_of_a_model_has_the_classes_of_its_layers_with_it() -> None:
    model = own_layer()
    model.compile("sgd", "mse")
    content, objects = as_file(model)
    assert list(objects) == ["Doubled"]
    found = Recipe(content, objects=cloudpickle.loads(cloudpickle.dumps(objects))).model()
    x = np.ones((1, 3))
    np.testing.assert_allclose(found.predict(x, verbose=0), model.predict(x, verbose=0))


def test_model_that_its_file_cannot_make_asks_for_a_function() -> None:
    import keras

    x = keras.Input((3,))
    model = keras.Model(x, keras.layers.Lambda(lambda value: value * 2)(x))
    with pytest.raises(ConfigError, match=r"cannot be loaded from its file.*Give a function"):
        as_file(model)


def test_loss_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no name"):
        objects_in(["mse", lambda y, p: y - p])


def test_labels_are_in_the_structure_of_the_outputs() -> None:
    import keras

    x = keras.Input((2,), name="x")
    parts = {"z": keras.layers.Dense(1)(x), "a": keras.layers.Dense(2)(x)}
    rows = {name: np.full(4, value) for value, name in enumerate(("f", "g", "l", "m", "n"))}
    model = keras.Model(x, parts)
    columns = Columns({"f": "x", "g": "x"}, {"l": "z", "n": "a", "m": "a"})
    values, labels = arranged(columns, model, rows, _joined)
    assert values.tolist() == [[0, 1]] * 4
    assert labels["z"].tolist() == [2] * 4
    assert labels["a"].tolist() == [[4, 3]] * 4
    model = keras.Model(x, list(parts.values()))
    found = arranged(Columns({"f": "", "g": ""}, {"l": "", "m": ""}), model, rows, _joined)[1]
    assert [each.tolist() for each in found] == [[2] * 4, [3] * 4]
    with pytest.raises(ConfigError, match=r"outputs dense_.*label_col={'l': '', 'm': '', 'n': ''}"):
        arranged(Columns({"f": "", "g": ""}, dict.fromkeys("lmn", "")), model, rows, _joined)


@pytest.mark.parametrize("labels", [[0, 1, 2], [[1, 0, 0], [0, 1, 0], [0, 0, 1]], [[0], [1], [2]]])
def test_rows_have_the_weight_of_their_class_and_their_own(labels: Any) -> None:
    import tensorflow as tf

    rows = {"y": tf.constant(labels), "w": tf.constant([1, 2, 3])}
    found = _weight(rows, Columns({}, {"y": ""}, "w"), {0: 0.5, 2: 10.0})
    assert found.numpy().tolist() == [0.5, 2.0, 30.0]
    assert _weight(rows, Columns({}, {"y": ""}), {}) is None
