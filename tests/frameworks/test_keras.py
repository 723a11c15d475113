"""How the Keras shim guards what it changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparkdl.core.errors import FrameworkMissingError
from sparkdl.datasets.keras_epochs import patches
from sparkdl.frameworks import keras as shim

pytestmark = pytest.mark.tensorflow


@pytest.fixture(autouse=True)
def _stock_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a Keras that gets back whatever the shim replaces."""
    for patch in shim._PATCHES:
        module, _, path = patch.target.partition(":")
        monkeypatch.setattr(f"{module}.{path}", patch.find())


def _found() -> list[Any]:
    return [patch.find() for patch in shim._PATCHES if patch.replacement]


def test_installed_keras_is_known() -> None:
    assert [text for patch in (*shim._PATCHES, *patches()) if (text := patch.objection())] == []


def test_second_shim_changes_nothing() -> None:
    stock = _found()
    shim.apply_shim()
    once = _found()
    shim.apply_shim()
    assert not {id(function) for function in stock} & {id(function) for function in once}
    assert [id(function) for function in _found()] == [id(function) for function in once]


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras' about numpy
def test_loaded_model_is_compiled(tmp_path: Path) -> None:
    import keras

    shim.apply_shim()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.125), "mse")
    model.fit(np.ones((4, 2)), np.ones(4), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert float(loaded.optimizer.learning_rate) == 0.125
    assert int(loaded.optimizer.iterations) == 1
    loaded.fit(np.ones((4, 2)), np.ones(4), verbose=0)


def test_other_backends_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import keras

    stock = _found()
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    shim.apply_shim()
    assert _found() == stock


class _Stream:
    """Stands in for a TFEpochIterator over one batch, and for the strategy that distributes it."""

    def __init__(self, spec: Any, batch: Any) -> None:
        self._distributed_dataset = SimpleNamespace(element_spec=spec)
        self._batch = batch

    def __iter__(self) -> Iterator[Any]:
        return iter([(0, 0, iter([self._batch]))])

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        return (value, "another replica")


def test_data_of_unknown_rank_is_sampled() -> None:
    import tensorflow as tf

    stream = _Stream((tf.TensorSpec(None), tf.TensorSpec((None, 1))), ("x", "y"))
    assert shim._specimen(stream, stream) == ("x", "y")


def test_absent_inputs_are_absent_from_the_specimen() -> None:
    import tensorflow as tf

    spec = (tf.TensorSpec((None, 2)), tf.OptionalSpec(tf.TensorSpec(())))
    stream = _Stream(spec, None)
    assert shim._specimen(stream, stream) == (spec[0], None)


def _rename(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("keras.src.backend.tensorflow.trainer.reduce_per_replica")


def _other_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keras.src.saving.saving_lib.save_model", lambda path, model: None)


def _other_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "keras.src.backend.tensorflow.trainer.TensorFlowTrainer._make_function",
        lambda self, step_function: step_function,
    )


@pytest.mark.parametrize("change", [_rename, _other_parameters, _other_source])
def test_unknown_keras_is_refused_when_a_model_of_several_workers_is_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: Any
) -> None:
    import keras

    change(monkeypatch)
    stock_predict = keras.Model.predict
    shim.apply_shim()
    assert "cannot be used with several workers" in caplog.text
    assert keras.Model.predict is stock_predict
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    monkeypatch.setattr(shim, "spans_workers", lambda strategy: True)
    model._distribute_strategy = object()
    with pytest.raises(FrameworkMissingError, match="TF_USE_LEGACY_KERAS=1") as caught:
        model.compile("sgd", "mse")
    assert shim.KNOWN_VERSIONS in str(caught.value)
    assert keras.__version__ in str(caught.value)
