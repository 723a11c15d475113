"""Arrays of different lengths on several nodes that train one model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparkdl.node.context import NodeContext
from tests.doubles.nodes import launch
from tests.frameworks.programs.models import strategy_of_workers

pytestmark = [pytest.mark.timeout(300), pytest.mark.deep]

SOON_S = 150.0
ROWS, WORDS, LONGEST, RATE, EPOCHS = 16, 5, 6, 0.05, 3
TOKENS = [[(row + place) % WORDS for place in range(row % LONGEST + 1)] for row in range(ROWS)]
DATA = [{"n": n, "tokens": tokens, "y": float(sum(tokens))} for n, tokens in enumerate(TOKENS)]


def weights_of_one_process() -> np.ndarray:
    """Return one weight a word, after gradient descent on all rows at once."""
    counts = np.array([np.bincount(tokens, minlength=WORDS) for tokens in TOKENS], float)
    y, found = counts @ np.arange(WORDS), np.zeros(WORDS)
    for _ in range(EPOCHS):
        found = found - RATE * 2 / ROWS * counts.T @ (counts @ found - y)
    return found


def model_of_words() -> Any:
    """Return a model that adds up one weight for each word of a row."""
    import keras
    from keras import ops

    class Words(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.last = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")

        def call(self, inputs: Any) -> Any:
            words = ops.one_hot(inputs["tokens"], WORDS)
            mask = ops.cast(inputs["tokens.mask"], "float32")
            return self.last(ops.sum(words * mask[..., None], axis=1))

    return Words()


WAYS: dict[str, int | None] = {"number": LONGEST + 2, "longest": None}


def fit(args: None, ctx: NodeContext) -> dict[str, Any]:
    """Fit on the rows in each way; all rows are one step."""
    import keras

    strategy, found = strategy_of_workers(), {}

    def compiled() -> Any:
        with strategy.scope():
            model = model_of_words()
            model.compile(keras.optimizers.SGD(RATE), "mse")
        return model

    for way, length in WAYS.items():
        x = ["tokens", "tokens.mask"]
        data = ctx.dataset(ROWS // 2, x=x, y="y", feed=way, pad={"tokens": length})
        model = compiled()
        model.fit(data, epochs=EPOCHS, verbose=0)
        found[way] = model.get_weights()[0][:, 0].tolist()
    return found


@pytest.mark.tensorflow
def test_workers_of_a_strategy_train_on_padded_columns_as_one_process_does() -> None:
    with launch(fit, framework="tensorflow") as cluster:
        for way in WAYS:
            cluster.feed(DATA, epochs=EPOCHS, feed=way, timeout_s=SOON_S)
        first, second = cluster.results(SOON_S)
    assert first == second
    for way in WAYS:
        np.testing.assert_allclose(first[way], weights_of_one_process(), rtol=1e-4, err_msg=way)
