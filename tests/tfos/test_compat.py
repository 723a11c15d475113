"""Models of either Keras, and of none, become SavedModels that TensorFlow loads without Keras."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkdl.ml.estimators.source import source_of
from sparkdl.ml.scoring.predict import load
from sparkdl.tfos import compat

pytestmark = pytest.mark.tensorflow

tf: Any = pytest.importorskip("tensorflow")


def keras_3() -> Any:
    import keras

    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, use_bias=False)])


def keras_2() -> Any:
    tf_keras = pytest.importorskip("tf_keras")
    return tf_keras.Sequential([tf_keras.layers.Dense(2, use_bias=False, input_shape=(3,))])


def answer(folder: Path, rows: Any) -> Any:
    serve = tf.saved_model.load(str(folder)).signatures["serving_default"]
    (name,) = serve.structured_input_signature[1]
    (values,) = serve(**{name: tf.constant(rows)}).values()
    return values.numpy()


@pytest.mark.filterwarnings("ignore")  # each Keras has its own about the other's TensorFlow
@pytest.mark.parametrize("make", [keras_3, keras_2])
def test_chief_exports_a_model_whole_in_the_place_of_an_older_one(
    make: Any, tmp_path: Path
) -> None:
    model, rows = make(), np.eye(3, dtype=np.float32)
    target = tmp_path / "deep" / "model"
    target.mkdir(parents=True)
    (target / "older").touch()
    compat.export_saved_model(model, str(target), is_chief=True)
    np.testing.assert_allclose(answer(target, rows), model.get_weights()[0], rtol=1e-6)
    assert not (target / "older").exists()
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def two_outputs() -> Any:
    import keras

    rows = keras.Input((3,))
    left = keras.layers.Dense(2, name="left")(rows)
    return keras.Model(rows, [left, keras.layers.Dense(1, name="right")(rows)])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [keras_3, keras_2, two_outputs])
def test_outputs_are_called_after_their_layers(make: Any, tmp_path: Path) -> None:
    model = make()
    compat.export_saved_model(model, str(tmp_path / "model"), is_chief=True)
    source = source_of(str(tmp_path / "model"))
    found = load(source)({load(source).signature.inputs[0].name: np.eye(3, dtype=np.float32)})
    names = [layer.name for layer in model.layers if layer.name.startswith(("dense", "l", "r"))]
    assert sorted(found) == sorted(names)
    for name in names:
        np.testing.assert_allclose(
            found[name], model.get_layer(name)(np.eye(3, dtype=np.float32)), rtol=1e-6
        )


@pytest.mark.filterwarnings("ignore")
def test_other_nodes_take_part_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported: list[str] = []

    monkeypatch.chdir(tmp_path)
    save = tf.saved_model.save

    def noted(model: Any, path: str) -> None:
        save(model, path)
        exported.append(path)

    monkeypatch.setattr(tf.saved_model, "save", noted)
    compat.export_saved_model(tf.Module(), "model")
    assert not list(tmp_path.iterdir())
    (elsewhere,) = exported
    assert not Path(elsewhere).exists()
    compat.export_saved_model(tf.Module(), "file://" + str(tmp_path / "model"), True)
    assert (tmp_path / "model" / "saved_model.pb").exists()


def test_export_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "older").touch()
    with pytest.raises(ValueError, match="Expected an object of type `Trackable`"):
        compat.export_saved_model(object(), str(tmp_path / "model"), True)
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "older"]


def test_datasets_are_taken_as_they_are_and_devices_are_counted() -> None:
    options = tf.data.Options()
    compat.disable_auto_shard(options)
    off = tf.data.experimental.AutoShardPolicy.OFF
    assert options.experimental_distribute.auto_shard_policy == off
    assert compat.is_gpu_available() == bool(tf.config.list_physical_devices("GPU"))
