"""A Keras model that is trained on a node equals plain Keras, whatever is killed meanwhile."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkdl.ml.estimators.columns import Columns
from sparkdl.ml.estimators.keras_train import KerasTask, ModelSpec, train
from sparkdl.ml.scoring.keras_objects import loaded
from tests.doubles.nodes import launch
from tests.ml.train_fns import FEATURES, classifier, worsening

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(300)]

ROWS, SEED = 64, 3


@pytest.mark.deep  # TorchEstimator's, and Keras' fit in tests/frameworks, are killed in make test
def test_killed_training_has_the_history_and_the_early_stopping_of_an_undisturbed_one(
    tmp_path: Path,
) -> None:
    """A step is over all rows, so that their order does not matter."""
    import keras

    marker = tmp_path / "died"
    spec = ModelSpec(classifier, "sgd", "mse")
    task = KerasTask(
        model_spec=spec,
        columns=Columns({"features": ""}, {"label": ""}),
        batch_size=ROWS,
        epochs=7,
        name="fit",
        seed=SEED,
        saves=True,
        callbacks=partial(worsening, marker),
    )
    x = np.repeat(np.arange(ROWS, dtype=np.float32)[:, None] / ROWS, FEATURES, axis=1)
    y = (np.arange(ROWS) > 31).astype(np.float32)
    rows = [{"features": a.tolist(), "label": float(b)} for a, b in zip(x, y, strict=True)]
    options: dict[str, Any] = {"max_restarts": 1, "checkpoint_dir": str(tmp_path / "checkpoints")}
    with launch(train, task, 1, framework="tensorflow", **options) as cluster:
        cluster.feed(rows, epochs=7)
        (result,) = cluster.results(120.0)
    assert marker.exists()
    keras.utils.set_random_seed(SEED)
    alone = spec.model()
    fit = alone.fit(x, y, ROWS, 7, verbose=0, callbacks=worsening(None), shuffle=False)
    undisturbed = fit.history["loss"]
    killed = result["history"]["loss"]
    # The second epoch was the best: it is not an epoch of the process that ended the training.
    assert len(killed) == 4
    assert killed[1] < min(killed[0], *killed[2:])
    assert killed == pytest.approx(undisturbed)
    found = loaded(result["content"], {}).get_weights()
    assert all(
        np.allclose(a, b, atol=1e-6) for a, b in zip(alone.get_weights(), found, strict=True)
    )
