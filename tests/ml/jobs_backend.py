"""What one partition learns and what the driver makes of two, beside Keras alone; any backend.

Runs in: the process of pytest, or one of its own with KERAS_BACKEND set
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkdl.ml.estimators.columns import Columns
from sparkdl.ml.estimators.keras_model import Recipe
from sparkdl.ml.estimators.keras_train import KerasTask
from sparkdl.ml.jobs.keras import KerasLearner, KerasMaster, backend, batch_of
from sparkdl.ml.jobs.work import total, weighed
from sparkdl.ml.scoring.keras_objects import saved

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 5)).astype(np.float32)
Y = (X.sum(1) > 0).astype(np.float32)
W = RNG.uniform(0.5, 2.0, 24).astype(np.float32)


def model(dropout: float = 0.0) -> Any:
    import keras

    made = keras.Sequential(
        [
            keras.Input((5,), name="x"),
            keras.layers.Dense(6, activation="tanh", kernel_regularizer="l2"),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(1, activation="sigmoid", name="y"),
        ]
    )
    made.compile(
        keras.optimizers.Adam(0.05, clipnorm=0.5),
        "binary_crossentropy",
        metrics=["accuracy", keras.metrics.AUC()],
    )
    return made


def task(made: Any) -> KerasTask:
    columns = Columns({"f": ""}, {"l": ""}, "w")
    recipe = Recipe(saved(made))
    return KerasTask(recipe=recipe, columns=columns, batch_size=8, epochs=1, name="n", seed=1)


def rows(*places: int) -> dict[str, Any]:
    chosen = list(range(*places))
    return {"f": X[chosen], "l": Y[chosen], "w": W[chosen]}


def gradients_of_two_partitions_are_those_of_all() -> None:
    alone = model()
    asked = task(alone)
    master = KerasMaster(asked)
    master.begin(rows(1))
    learner = KerasLearner(asked, None, backend())
    for start in (0, 12):
        cuts = [rows(start, start + 3), rows(start + 3, start + 12)]  # uneven
        found = []
        for number, cut in enumerate(cuts):
            learner.load(master.state())
            found.append(weighed(number, len(cut["l"]), *learner.learn(cut, seed=7)))
        whole = total(found)
        master.apply(whole.averages())
        logs = alone.train_on_batch(
            *batch_of(asked, alone, rows(start, start + 12)), return_dict=True
        )
        measured = master.metrics(whole.metrics)
        assert np.isclose(measured["accuracy"], logs["accuracy"])
        alone.reset_metrics()
        for mine, theirs in zip(master.model.get_weights(), alone.get_weights(), strict=True):
            assert np.allclose(mine, theirs, atol=2e-5), np.abs(mine - theirs).max()


def random_layers_draw_by_the_seed() -> None:
    asked = task(model(dropout=0.5))
    learner = KerasLearner(asked, None, backend())
    state = KerasMaster(asked).state()
    vectors = []
    for seed in (1, 2, 1):
        learner.load(state)
        vectors.append(learner.learn(rows(0, 8), seed)[0][0])
    assert np.array_equal(vectors[0], vectors[2])
    assert not np.array_equal(vectors[0], vectors[1])


PROOFS = (
    gradients_of_two_partitions_are_those_of_all,
    random_layers_draw_by_the_seed,
)

if __name__ == "__main__":
    for proof in PROOFS:
        proof()
