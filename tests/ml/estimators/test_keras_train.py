"""A Keras model by the names of its inputs and outputs, and how it is made again elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from sparkdl.core.errors import ConfigError, FeedTypeError
from sparkdl.ml.estimators import keras_train
from sparkdl.ml.estimators.columns import Columns
from sparkdl.ml.estimators.keras_train import Fitting, KerasTask, ModelSpec, arranged
from sparkdl.ml.scoring import keras_weights
from sparkdl.ml.scoring.keras_objects import loaded, registered, save_checked, save_to, saved
from sparkdl.ml.scoring.source import Tensor, source_of_content
from sparkdl.ml.scoring.tensorflow import keras_predictor
from tests.doubles.programs import output_of

pytestmark = pytest.mark.tensorflow
MEASURED = """
import pathlib, sys, keras
from sparkdl.ml.scoring import keras_objects, keras_weights, source, tensorflow
status = lambda key: next(int(l.split()[1]) for l in open("/proc/self/status") if key in l) << 10
path, before = pathlib.Path(sys.argv[1]), status("VmRSS")
if path.exists():
    model = tensorflow.load_tensorflow(source.source_of(str(path)), None)
else:
    with keras_weights.large_weights(is_file=False):
        rows = keras.layers.Embedding(1 << 20, 72)
        model = keras.Sequential([keras.Input((1,), dtype="int32"), rows])
    keras_objects.save_checked(path, model, {})
print((status("VmRSS") - before) / path.stat().st_size)
print((status("VmHWM") - before) / path.stat().st_size)
"""


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
    by_name = {tensor.name: tensor for tensor in keras_train.inputs_of(model)}
    places = {id(tensor): name for tensor, name in zip(model.inputs, by_name, strict=True)}
    minuend = places.get(id(left), next(iter(by_name)))
    values = {name: np.full((2, 1), 3.0 if name == minuend else 1.0) for name in by_name}
    found = model.predict(keras_train.as_inputs(model, values), verbose=0)
    np.testing.assert_array_equal(found, np.full((2, 1), 2.0))


def own_parts(keras: Any, scale: float = 2.0) -> tuple[Any, dict[str, Any]]:
    """Make a model of a class and a function that Keras does not have; return it with these."""

    class Doubled(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return 2 * x

    def scaled(x: Any) -> Any:
        return scale * x

    x = keras.layers.Input((3,), name="x")
    y = keras.layers.Dense(2, activation=scaled, name="y")(Doubled()(x))
    model = keras.Model(x, keras.layers.Dense(1, name="z")(y))
    return model, {"Doubled": Doubled, "scaled": scaled}


def test_custom_objects_travel_with_a_trained_model_its_optimizer_does_not(tmp_path: Path) -> None:
    import keras

    def squares(y: Any, p: Any) -> Any:
        return (y - p) ** 2

    made, objects = own_parts(keras)
    model_spec = ModelSpec(source_of_content(saved(made)), "sgd", squares, objects=objects)
    model_spec = cloudpickle.loads(cloudpickle.dumps(model_spec))
    model = model_spec.model()
    model.optimizer.build(model.trainable_variables)
    model_spec.save(model, file := tmp_path / "a.keras")
    assert model.compiled
    found = loaded(file, objects)
    assert not found.compiled
    assert file.stat().st_size < len(saved(model))
    x = np.ones((2, 3), np.float32)
    np.testing.assert_allclose(found.predict(x, verbose=0), model.predict(x, verbose=0))
    predictor = keras_predictor(found)
    assert [tensor.name for tensor in predictor.signature.outputs] == ["z"]


def test_outputs_of_a_dict_keep_their_names_where_the_model_is_made_again(tmp_path: Path) -> None:
    import keras

    inner, objects = own_parts(keras)

    def make() -> Any:
        (x,) = inner.inputs
        return keras.Model(x, {"z": inner(x), "a": keras.layers.Dense(2)(inner(x))})

    model_spec = ModelSpec(make, loss="mse", objects=objects)
    model_spec.save(model_spec.model(), tmp_path / "a.keras")
    predictor = keras_predictor(loaded(tmp_path / "a.keras", objects))
    found = predictor({"x": np.ones((1, 3), np.float32)})
    assert {name: values.shape for name, values in found.items()} == {"z": (1, 1), "a": (1, 2)}
    shapes = {tensor.name: tensor.shape for tensor in predictor.signature.outputs}
    assert shapes == {"z": (None, 1), "a": (None, 2)}


def test_node_makes_a_large_model_in_two_copies_and_a_scorer_loads_it_in_one(
    tmp_path: Path,
) -> None:
    node, scorer = (
        [float(copies) for copies in output_of(sys.executable, "-c", MEASURED, path).split()]
        for path in [tmp_path / "a.keras"] * 2
    )
    assert max(node) < 2.7  # Keras: 4.2
    assert max(scorer) < 1.2


def test_large_weights_are_those_of_keras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import keras

    class Unsaved(keras.layers.Layer):  # type: ignore[misc]
        def build(self, _shape: Any) -> None:
            self.unsaved = self.add_weight((500,), "ones")

        def save_own_variables(self, store: Any) -> None:
            store["number"] = 3

        def load_own_variables(self, store: Any) -> None:
            assert int(store["number"]) == 3

        def call(self, x: Any) -> Any:
            return x + self.unsaved[0]

    def made() -> Any:
        keras.utils.set_random_seed(1)
        dense = [keras.layers.Dense(90, dtype=each) for each in ("float32", "float16", "bfloat16")]
        return keras.Sequential([keras.Input((30,)), *dense, Unsaved(), keras.layers.Dense(1)])

    def weights(model: Any) -> Any:
        return [np.asarray(each, np.float32) for each in model.get_weights()]

    by_keras, file = made(), tmp_path / "a.keras"
    by_keras.save(file)
    wanted = weights(by_keras)
    monkeypatch.setattr(keras_weights, "_LARGE_NBYTES", 1000)
    with keras_weights.large_weights(is_file=False):
        ours = made()
    np.testing.assert_equal(weights(ours), wanted)
    save_to(tmp_path / "ours.keras", ours)
    found = loaded(file, {"Unsaved": Unsaved})
    np.testing.assert_equal(weights(found), wanted)
    assert not weights(loaded(file, {"Unsaved": Unsaved}, reads=False))[0].any()
    monkeypatch.undo()
    back = keras.saving.load_model(tmp_path / "ours.keras", {"Unsaved": Unsaved})
    np.testing.assert_equal(weights(back), wanted)
    for model in (by_keras, found):  # training may write to the memory that they share
        model.compile("adam", "mse")
        model.fit(np.ones((8, 30)), np.ones(8), verbose=0)
    np.testing.assert_equal(weights(found), weights(by_keras))


def test_layer_that_keras_cannot_make_again_is_refused_with_the_cure(tmp_path: Path) -> None:
    import keras

    class Scaled(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self, table: Any) -> None:
            super().__init__()
            self.table = table

        def call(self, x: Any) -> Any:
            return x * 2.0

    model = keras.Sequential([keras.Input((3,)), Scaled(object())])
    with pytest.raises(ConfigError, match=r"cannot be saved to a file.*Give its own.*get_config"):
        save_checked(tmp_path / "model.keras", model, {})
    content = saved(own_parts(keras)[0])
    with pytest.raises(ConfigError, match=r"Could not locate class 'Doubled'.*custom_obj") as found:
        loaded(content, {})
    assert len(str(found.value)) < 1200


def test_layer_that_the_program_has_registered_travels_to_tasks() -> None:
    import keras

    class Twice(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return 2 * x

    model = keras.Sequential([keras.Input((3,)), Twice(), keras.layers.Dense(1)])
    plain = saved(model)
    keras.saving.register_keras_serializable("mine")(Twice)
    try:
        own, objects = saved(model), cloudpickle.loads(cloudpickle.dumps(registered()))
    finally:
        del keras.saving.get_custom_objects()["mine>Twice"]
    x = np.ones((1, 3), np.float32)
    for content in (own, plain):  # as the driver saves it, and as a node does
        np.testing.assert_array_equal(loaded(content, objects)(x), model(x))
    with pytest.raises(ConfigError, match="Could not locate class 'Twice'"):
        loaded(own, {})


def test_labels_are_in_the_structure_of_the_outputs() -> None:
    import keras

    x = keras.Input((2,), name="x")
    parts = {"z": keras.layers.Dense(1)(x), "a": keras.layers.Dense(2)(x)}
    rows = {name: np.full(4, value) for value, name in enumerate(("f", "g", "l", "m", "n"))}

    def made(outputs: Any, columns: Columns) -> tuple[Any, Any]:
        model = keras.Model(x, outputs)
        model.compile("sgd", "mse")
        task = KerasTask(
            model_spec=ModelSpec(dict), columns=columns, batch_size=4, epochs=1, name="n"
        )
        return arranged(model, Fitting.of(task, model)(rows))

    values, labels = made(parts, Columns({"f": "x", "g": "x"}, {"l": "z", "n": "a", "m": "a"}))
    assert values.tolist() == [[0, 1]] * 4
    assert labels["z"].tolist() == [2] * 4
    assert labels["a"].tolist() == [[4, 3]] * 4
    heads = list(parts.values())
    found = made(heads, Columns({"f": "", "g": ""}, {"l": "", "m": ""}))[1]
    assert [each.tolist() for each in found] == [[2] * 4, [3] * 4]
    with pytest.raises(ConfigError, match=r"outputs dense_.*label_col={'l': '', 'm': '', 'n': ''}"):
        made(heads, Columns({"f": "", "g": ""}, dict.fromkeys("lmn", "")))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("mse", []),
        ("sparse_categorical_crossentropy", ["l", "m"]),
        (["mse", "SparseCategoricalCrossentropy"], ["m"]),
        ({"b": "sparse_categorical_crossentropy"}, ["m"]),
    ],
)
def test_labels_of_classes_are_known_by_the_loss(loss: Any, expected: list[str]) -> None:
    import keras

    assert keras_train.class_labels(loss, {"l": "", "m": ""}, ["a", "b"]) == expected
    assert keras_train.class_labels(loss, {"m": "b", "l": "a"}, ["a", "b"]) == expected[::-1]
    own = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    assert keras_train.class_labels(own, {"l": ""}, ["a"]) == ["l"]


@pytest.mark.parametrize(
    ("column", "match"),
    [
        ("ids", r"column 'ids' holds 12.5, which does not fit in int32.*input x"),
        ("y", r"column 'y' holds 12.5, and the loss takes the numbers of classes"),
        ("w", r"column 'w' holds the weight -12.5: .*0 or more"),
    ],
)
def test_training_refuses_the_numbers_that_scoring_refuses(column: str, match: str) -> None:
    whole = {"ids": np.array([1.0, 2]), "y": np.array([0.0, 1]), "w": np.array([0.0, 1.5])}
    broken = {**whole, column: np.array([1.0, -12.5 if column == "w" else 12.5])}
    columns = Columns({"ids": ""}, {"y": ""}, "w")
    fitting = Fitting(columns, {"ids": Tensor("x", "int32", (None, 1))}, {}, ["y"])
    x, y, w = fitting(whole).values()
    assert (x.dtype, x.shape) == (np.int32, (2, 1))
    assert (y is whole["y"], w is whole["w"]) == (True, True)
    with pytest.raises(FeedTypeError, match="'ids' holds text, and the model's input needs x"):
        fitting({**whole, "ids": np.array(["a", "b"], object)})
    with pytest.raises(FeedTypeError, match=r"column 'ids' holds rows of shape \[2\]"):
        fitting({**whole, "ids": np.ones((2, 2))})
    with pytest.raises(FeedTypeError, match=match):
        fitting(broken)
