"""`KerasEstimator` on Parquet files, on two nodes of a lab; no Spark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkdl.core.errors import ConfigError, FeedTypeError
from sparkdl.horovod.spark.common.backend import SparkBackend
from sparkdl.horovod.spark.common.store import FilesystemStore, LocalStore
from sparkdl.horovod.spark.keras.models import KerasScoring
from tests.doubles.labs import Lab, lab
from tests.horovod.spark.common.linear import WEIGHTS, InLab, InThisProcess, fill

pytestmark = [pytest.mark.tensorflow, pytest.mark.torch]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab(tmp_path_factory.mktemp("lab"), "tensorflow", 2) as found:
        yield found


@pytest.fixture
def store(tmp_path: Path) -> FilesystemStore:
    return fill(LocalStore(str(tmp_path)), tmp_path)


def linear(library: str = "keras") -> Any:
    keras = pytest.importorskip(library)
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.layers.Input([2]), keras.layers.Dense(1)])


def estimator(place: FilesystemStore, **options: Any) -> Any:
    import keras

    from sparkdl.horovod.spark.keras import KerasEstimator

    given = {
        "backend": InThisProcess(),
        "store": place,
        "model": options.get("model") or linear(),
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.5),
        "loss": "mse",
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 3,
        "verbose": 0,
        "run_id": "run",
        "random_seed": 1,
        **options,
    }
    return KerasEstimator(**{name: value for name, value in given.items() if value is not None})


def test_training_learns_and_leaves_its_files(
    nodes: Lab, store: FilesystemStore, tmp_path: Path
) -> None:
    import keras

    model = estimator(
        store, backend=InLab(nodes), epochs=12, validation=0.5, metrics=["mae"]
    ).fit_on_parquet()
    assert np.allclose(model.getModel().get_weights()[0][:, 0], WEIGHTS, atol=0.05)
    history = model.getHistory()
    assert set(history) == {"loss", "mae", "val_loss", "val_mae"}
    assert len(history["loss"]) == 12
    assert history["val_loss"][-1] < 0.01 < history["loss"][0]
    saved = keras.models.load_model(tmp_path / "runs" / "run" / "checkpoint.keras")
    assert np.allclose(saved.get_weights()[0], model.getModel().get_weights()[0])
    assert float(saved.optimizer.learning_rate) == pytest.approx(0.1)
    assert model._get_floatx() == "float32"
    assert list((tmp_path / "runs" / "run" / "logs").rglob("events.*"))
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run"]


def test_run_with_a_checkpoint_is_continued(nodes: Lab, store: FilesystemStore) -> None:
    options = {"backend": InLab(nodes), "shuffle": False}
    first = estimator(store, **options).fit_on_parquet().getHistory()["loss"]
    second = estimator(store, **options).fit_on_parquet().getHistory()["loss"]
    at_once = estimator(store, **options, epochs=6, run_id="b").fit_on_parquet()
    assert [*first, *second] == pytest.approx(at_once.getHistory()["loss"], rel=1e-4)


def test_weights_losses_and_callbacks_of_the_users_own(nodes: Lab, store: FilesystemStore) -> None:
    import keras

    from sparkdl.horovod.keras.callbacks import LearningRateScheduleCallback

    def own_loss(y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)

    class Halve(keras.layers.Layer):  # type: ignore[misc]
        def call(self, values: Any) -> Any:
            return values / 2

    def twice(values: Any) -> Any:
        return np.multiply(2.0, 1.0) * values

    schedule = LearningRateScheduleCallback(0.0, multiplier=lambda epoch: 1.0 / (1 + epoch))
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Input([2]), Halve(), keras.layers.Dense(1)]
    layers += [keras.layers.Lambda(twice), keras.layers.Lambda(lambda x: np.divide(1.0, 2.0) * x)]
    model = estimator(
        store,
        backend=InLab(nodes),
        model=keras.Sequential(layers),
        loss=own_loss,
        metrics=[lambda y_true, y_pred: own_loss(y_true, y_pred)],
        sample_weight_col="w",
        callbacks=[schedule],
        checkpoint_callback=keras.callbacks.ModelCheckpoint(
            "best.keras", "loss", save_best_only=True
        ),
    ).fit_on_parquet()
    x = np.ones((1, 2), np.float32)
    dense = next(each for each in model.getModel().layers if isinstance(each, keras.layers.Dense))
    assert np.allclose(model.getModel().predict(x, verbose=0), dense(x / 2))
    assert model.getModel().compiled
    assert model.getHistory()["lr"] == pytest.approx([0.2, 0.1, 0.2 / 3])
    assert model.getHistory()["loss"][-1] < model.getHistory()["loss"][0]


def test_numbers_that_do_not_fit_are_refused(nodes: Lab, store: FilesystemStore) -> None:
    import keras

    layers = [keras.layers.Input([2], dtype="int32"), keras.layers.Rescaling(1.0)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    made = estimator(store, backend=InLab(nodes), model=model)
    with pytest.raises(AssertionError, match=r"FeedTypeError: column 'x' holds .* fit in int32"):
        made.fit_on_parquet()
    scoring = KerasScoring.of(model, {})()
    assert scoring(np.ones((1, 2)))[0].shape == (1, 1)
    with pytest.raises(FeedTypeError, match=r"holds 12.5, which does not fit in int32"):
        scoring(np.full((1, 2), 12.5))


def test_checkpoint_that_was_never_saved_says_why(nodes: Lab, store: FilesystemStore) -> None:
    import keras

    saver = keras.callbacks.ModelCheckpoint("best.keras", "loss", save_freq=1000)
    made = estimator(store, backend=InLab(nodes), checkpoint_callback=saver)
    with pytest.raises(AssertionError, match="its monitor must be one of loss"):
        made.fit_on_parquet()


def doubled(x: Any) -> Any:
    return np.multiply(2.0, 1.0) * x


@pytest.mark.deep
def test_two_processes_train_models_of_tf_keras(store: FilesystemStore) -> None:
    keras = pytest.importorskip("tf_keras")
    backend = SparkBackend(2, verbose=0, executor="local")
    optimizer = keras.optimizers.SGD(0.05)
    layers = [keras.layers.Lambda(doubled), keras.layers.Lambda(lambda x: np.divide(1.0, 2.0) * x)]
    net = keras.Sequential([keras.layers.Input([2]), keras.layers.Dense(1), *layers])
    made = estimator(store, backend=backend, model=net, optimizer=optimizer)
    model = made.setEpochs(12).fit_on_parquet()
    assert np.allclose(model.getModel().get_weights()[0][:, 0], WEIGHTS, atol=0.2)
    assert float(model.getModel().optimizer.learning_rate) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"loss": None}, "Loss parameter is required"),
        ({"optimizer": None}, "Optimizer must be provided"),
        ({"model": "a model"}, "model must be a Keras model, not str"),
        ({"label_cols": ["y", "w"]}, "Label column count 2 must equal model outputs count 1"),
        ({"feature_cols": ["y"]}, "Feature column 'y' with size 1 must equal"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    options: dict[str, Any], text: str, store: FilesystemStore
) -> None:
    with pytest.raises(ConfigError, match=text):
        estimator(store, **options).fit_on_parquet()


def test_model_without_input_shapes_is_refused(store: FilesystemStore) -> None:
    import keras

    model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(ConfigError, match="has no input shapes"):
        estimator(store, model=model).fit_on_parquet()
