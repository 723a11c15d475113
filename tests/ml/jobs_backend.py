"""What one partition learns and what the driver makes of two, beside Keras alone; any backend.

Runs in: the process of pytest, or one of its own with KERAS_BACKEND set
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from sparkdl.ml.estimators.columns import Columns
from sparkdl.ml.estimators.keras_model import Recipe
from sparkdl.ml.estimators.keras_objects import as_content
from sparkdl.ml.estimators.keras_train import KerasTask
from sparkdl.ml.jobs.keras import KerasMaster, KerasSpec, backend, batch_of, signature_of
from sparkdl.ml.jobs.task import Sum, added, joined, pack, parts, total

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
    recipe = Recipe(as_content(made))
    return KerasTask(recipe=recipe, columns=columns, batch_size=8, epochs=1, name="n", seed=1)


def rows(*places: int) -> dict[str, Any]:
    chosen = list(range(*places))
    return {"f": X[chosen], "l": Y[chosen], "w": W[chosen]}


def gradients_of_two_partitions_are_those_of_all() -> None:
    alone = model()
    asked = task(alone)
    master = KerasMaster(asked, is_local=False)
    master.begin(rows(1))
    learner = KerasSpec(asked, None, False, backend()).learner()
    for start in (0, 12):
        cuts = [rows(start, start + 3), rows(start + 3, start + 12)]  # uneven
        found = []
        for number, cut in enumerate(cuts):
            learner.load(master.state())
            metrics = learner.learn(cut, seed=7)
            vector, exact = pack(learner.learned())
            size = len(cut["l"])
            found.append(Sum(number, size, vector * np.float32(size), exact, metrics))
        sliced = [pair for each in found for pair in parts(each, "slices", 2)]
        groups = [[pair for pair in sliced if pair[0] == number] for number in range(2)]
        whole = joined([pair for group in groups for pair in added(group)], "slices")
        plain = total(found).vector
        assert whole.vector is not None
        assert plain is not None
        assert np.allclose(whole.vector, plain)
        master.apply(replace(whole, vector=whole.vector / whole.weight))
        logs = alone.train_on_batch(
            *batch_of(asked, alone, rows(start, start + 12)), return_dict=True
        )
        measured = master.metrics(whole.metrics)
        assert np.isclose(measured["accuracy"], logs["accuracy"])
        alone.reset_metrics()
        for mine, theirs in zip(master.model.get_weights(), alone.get_weights(), strict=True):
            assert np.allclose(mine, theirs, atol=2e-5), np.abs(mine - theirs).max()
    names = [tensor.name for tensor in signature_of(alone).outputs]
    assert names == ["y"]
    # What a checkpoint holds brings another driver to where this one is.
    other = KerasMaster(asked, is_local=False)
    other.begin(rows(1))
    other.restore(master.save())
    assert all(np.array_equal(a, b) for a, b in zip(master.save(), other.save(), strict=True))


def local_steps_are_steps_and_what_is_random_is_repeated() -> None:
    alone = model()
    asked = task(alone)
    master = KerasMaster(asked, is_local=True)
    master.begin(rows(1))
    learner = KerasSpec(asked, None, True, backend()).learner()
    for _ in range(2):
        learner.load(master.state())
        for start in (0, 8, 16):
            learner.learn(rows(start, start + 8), seed=start)
            alone.train_on_batch(*batch_of(asked, alone, rows(start, start + 8)))
        vector, exact = pack(learner.learned())
        master.apply(Sum(0, 1, vector, exact))
    for mine, theirs in zip(master.model.get_weights(), alone.get_weights(), strict=True):
        assert np.allclose(mine, theirs, atol=2e-5)

    asked = task(model(dropout=0.5))
    learner = KerasSpec(asked, None, False, backend()).learner()
    state = KerasMaster(asked, is_local=False).state()
    vectors = []
    for seed in (1, 2, 1):
        learner.load(state)
        learner.learn(rows(0, 8), seed)
        vectors.append(pack(learner.learned())[0])
    assert np.array_equal(vectors[0], vectors[2])
    assert not np.array_equal(vectors[0], vectors[1])


def early_stoppings_continue_with_their_own_best_epoch_and_weights() -> None:
    import keras

    def callbacks() -> list[Any]:
        stop = keras.callbacks.EarlyStopping
        options: Any = {"monitor": "loss", "patience": 9}
        return [stop(**options), stop(restore_best_weights=True, **options), stop(**options)]

    asked = replace(task(model()), callbacks=callbacks)
    master, other = (KerasMaster(asked, is_local=False) for _ in range(2))
    for each in (master, other):
        each.begin(rows(1))
    for epoch, loss in enumerate((0.5, 0.25, 0.75)):
        master.epoch_begins(epoch)
        master.epoch_ended(epoch, {"loss": loss})
    other.restore(master.save())
    for mine, theirs in zip(other._stopping(), master._stopping(), strict=True):
        assert (mine.best, mine.wait, mine.best_epoch) == (0.25, 1, 1)
        assert (mine.best_weights is None) == (theirs.best_weights is None)
    kept = [each.best_weights for each in (other._stopping()[1], master._stopping()[1])]
    assert all(np.array_equal(a, b) for a, b in zip(*kept, strict=True))


PROOFS = (
    early_stoppings_continue_with_their_own_best_epoch_and_weights,
    gradients_of_two_partitions_are_those_of_all,
    local_steps_are_steps_and_what_is_random_is_repeated,
)

if __name__ == "__main__":
    for proof in PROOFS:
        proof()
