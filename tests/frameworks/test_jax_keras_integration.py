"""Keras 3 on two nodes of JAX: plain `fit`, data or model parallel, trains as one process does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparkdl.core.errors import ConfigError
from sparkdl.node.context import NodeContext
from tests.doubles.labs import Lab, lab_of

pytestmark = [pytest.mark.jax, pytest.mark.deep, pytest.mark.timeout(300)]

_SOON_S = 150.0
ROWS = 32


pair = lab_of("jax", 2)


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    return x, x.sum(1)


def train(feed: str, ctx: NodeContext) -> dict[str, Any]:
    """Fit a model by each distribution and by none, all rows in a step; the last epoch has two."""
    import keras
    from jax.experimental import multihost_utils

    distribution = keras.distribution
    with pytest.raises(ConfigError, match="each node would train a separate model"):
        ctx.jax_batches(ROWS // 2, x="x", y="y", feed=feed).as_keras()

    def fitted(chosen: Any, x: Any, y: Any, **options: Any) -> dict[str, Any]:
        distribution.set_distribution(chosen)
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(8, "tanh", name="hidden"),
                keras.layers.Dense(1, name="last"),
            ]
        )
        model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
        history = model.fit(x() if y is None else x, y, epochs=3, verbose=0, **options).history
        kernel = model.layers[0].kernel.value
        return {
            "history": history,
            "steps": int(np.asarray(model.optimizer.iterations.value)),
            "held": list(kernel.addressable_shards[0].data.shape),
            "kernel": np.asarray(
                multihost_utils.process_allgather(kernel, tiled=chosen is not None)
            ),
        }

    def batches(rows: int) -> Any:
        return ctx.jax_batches(rows, x="x", y="y", feed=feed)

    x, y = data()
    found = {"alone": fitted(None, x, y, batch_size=ROWS, shuffle=False)}
    chosen: Any = distribution.DataParallel(auto_shard_dataset=False)
    share = ROWS // 2  # the rows of one node
    found["data"] = fitted(chosen, lambda: batches(share).as_keras(), None)
    layout = distribution.LayoutMap(distribution.DeviceMesh((1, 2), ("batch", "model")))
    layout[".*hidden/kernel"] = (None, "model")
    layout[".*hidden/bias"] = ("model",)
    layout[".*last/kernel"] = ("model", None)
    chosen = distribution.ModelParallel(layout_map=layout, auto_shard_dataset=False)
    found["model"] = fitted(chosen, lambda: batches(ROWS).as_keras(), None)
    return found


def test_fit_trains_on_all_rows_as_one_process_does(pair: Lab) -> None:
    rows = [{"x": x.tolist(), "y": float(y)} for x, y in zip(*data(), strict=True)]
    pair.begin(train, "rows")
    for _ in ("data", "model"):
        pair.cluster.feed(rows, epochs=2, feed="rows", timeout_s=_SOON_S)
        pair.cluster.feed(rows * 2, feed="rows", timeout_s=_SOON_S)
    first, second = pair.results()
    for name, held in {"data": [4, 8], "model": [4, 4]}.items():
        assert first[name]["held"] == held
        assert first[name]["history"] == second[name]["history"]
        assert first[name]["steps"] == 4, "the third epoch is longer than the first"
        for metric, values in first["alone"]["history"].items():
            np.testing.assert_allclose(first[name]["history"][metric][:2], values[:2], rtol=1e-5)
    np.testing.assert_allclose(first["data"]["kernel"], second["model"]["kernel"], atol=0.05)
