"""Models of either Keras, and of none, become SavedModels that TensorFlow loads without Keras."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkdl.ml.scoring.loaded import load
from sparkdl.ml.scoring.source import source_of
from sparkdl.tfos import compat

pytestmark = pytest.mark.tensorflow


@pytest.fixture(scope="module")
def tf() -> Any:
    """TensorFlow, which takes each process that collects the tests seconds to import."""
    import tensorflow

    return tensorflow


def keras_2() -> Any:
    tf_keras = pytest.importorskip("tf_keras")
    return tf_keras.Sequential([tf_keras.layers.Dense(2, use_bias=False, input_shape=(3,))])


def two_outputs() -> Any:
    import keras

    rows = keras.Input((3,))
    left = keras.layers.Dense(2, name="left")(rows)
    return keras.Model(rows, [left, keras.layers.Dense(1, name="right")(rows)])


@pytest.mark.filterwarnings("ignore")  # each Keras has its own about the other's TensorFlow
@pytest.mark.parametrize("make", [two_outputs, pytest.param(keras_2, marks=pytest.mark.deep)])
def test_chief_exports_a_model_with_outputs_by_layers(tf: Any, make: Any, tmp_path: Path) -> None:
    model, rows = make(), np.eye(3, dtype=np.float32)
    target = tmp_path / "deep" / "model"
    compat.export_saved_model(model, str(target), is_chief=True)
    serve = tf.saved_model.load(str(target)).signatures["serving_default"]
    (name,) = serve.structured_input_signature[1]
    answers = [each.numpy() for each in serve(**{name: tf.constant(rows)}).values()]
    source = source_of(str(target))
    found = load(source)({load(source).signature.inputs[0].name: rows})
    names = [layer.name for layer in model.layers if layer.name.startswith(("dense", "l", "r"))]
    assert sorted(found) == sorted(names)
    assert len(answers) == len(names)
    for name in names:
        wanted = model.get_layer(name)(rows)
        np.testing.assert_allclose(found[name], wanted, rtol=1e-6)
        assert any(each.shape == wanted.shape and np.allclose(each, wanted) for each in answers)


@pytest.mark.filterwarnings("ignore")
def test_other_nodes_take_part_and_leave_nothing(
    tf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_datasets_are_taken_as_they_are_and_devices_are_counted(tf: Any) -> None:
    options = tf.data.Options()
    compat.disable_auto_shard(options)
    off = tf.data.experimental.AutoShardPolicy.OFF
    assert options.experimental_distribute.auto_shard_policy == off
    assert compat.is_gpu_available() == bool(tf.config.list_physical_devices("GPU"))
