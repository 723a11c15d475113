"""A small convolutional network on real digits: data, first weights, and its loss in numpy.

All ways of `frameworks.py` train this one: two convolutions of 3 x 3, one dense layer, plain SGD,
the same rows in the same order. Weights are in TensorFlow's layout: kernels `[height, width, in,
out]`, the dense layer's rows by height, width and channel.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

SIDE = 8
CLASSES = 10
CHANNELS = (16, 32)
LEARNING_RATE = 0.05

Array = np.ndarray[Any, Any]


def digits() -> tuple[Array, Array]:
    """Return images `[1797, 8, 8, 1]`, float32 from 0 to 1, and labels `[1797]`, int64."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return (data.images[..., None] / 16).astype(np.float32), data.target.astype(np.int64)


def weights(seed: int = 0) -> list[Array]:
    """Return the first weights: kernel and bias of each layer (He et al., arXiv:1502.01852)."""
    rng = np.random.default_rng(seed)
    inner = SIDE - 2 * len(CHANNELS)
    shapes: list[tuple[int, ...]] = [
        (3, 3, 1, CHANNELS[0]),
        (3, 3, CHANNELS[0], CHANNELS[1]),
        (inner * inner * CHANNELS[1], CLASSES),
    ]
    made: list[Array] = []
    for shape in shapes:
        scale = np.sqrt(2 / np.prod(shape[:-1]))
        made += [rng.normal(0, scale, shape).astype(np.float32), np.zeros(shape[-1], np.float32)]
    return made


def parts(batch: int, steps: int, rank: int, size: int, seed: int = 1) -> tuple[Array, Array]:
    """Return a node's rows of all steps, in order: `[steps * batch // size, …]` of both."""
    x, y = digits()
    rng = np.random.default_rng(seed)
    passes = -(-steps * batch // len(x))
    order = np.concatenate([rng.permutation(len(x)) for _ in range(passes)])[: steps * batch]
    mine = order.reshape(steps, size, batch // size)[:, rank].ravel()
    return x[mine], y[mine]


def batches(x: Array, y: Array, batch: int) -> Iterator[tuple[Array, Array]]:
    """Yield a node's batches."""
    for start in range(0, len(x), batch):
        yield x[start : start + batch], y[start : start + batch]


def loss(made: list[Array]) -> float:
    """Return the mean cross entropy over all digits, computed in numpy alone."""
    x, y = digits()
    values: Array = x.astype(np.float64)
    for kernel, bias in ((made[0], made[1]), (made[2], made[3])):
        windows = np.lib.stride_tricks.sliding_window_view(values, (3, 3), axis=(1, 2))
        values = np.maximum(np.einsum("nhwcij,ijco->nhwo", windows, kernel) + bias, 0)
    logits = values.reshape(len(x), -1) @ made[4] + made[5]
    logits -= logits.max(1, keepdims=True)
    return float(np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]))


class Clock:
    """Times the steps after the first ones, which compile and connect."""

    def __init__(self, warm_up: int) -> None:
        self._warm_up = warm_up
        self._steps = 0
        self._start: float | None = None
        self.seconds = 0.0

    def step(self) -> None:
        """Count a step that has ended."""
        self._steps += 1
        now = time.perf_counter()
        if self._steps == self._warm_up:
            self._start = now
        if self._start is not None:
            self.seconds = now - self._start


def keras_model(keras: Any) -> Any:
    """Return the network for Keras, with the first weights."""
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((SIDE, SIDE, 1)),
            *(layers.Conv2D(channels, 3, activation="relu") for channels in CHANNELS),
            layers.Flatten(),
            layers.Dense(CLASSES),
        ]
    )
    model.set_weights(weights())
    return model


def torch_model() -> Any:
    """Return the network for PyTorch, with the first weights; it takes images `[n, 1, 8, 8]`."""
    import torch
    from torch import nn

    model = nn.Sequential(
        nn.Conv2d(1, CHANNELS[0], 3),
        nn.ReLU(),
        nn.Conv2d(CHANNELS[0], CHANNELS[1], 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(CHANNELS[1] * (SIDE - 4) ** 2, CLASSES),
    )
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), to_torch(weights()), strict=True):
            parameter.copy_(torch.from_numpy(value))
    return model


def to_torch(made: list[Array]) -> list[Array]:
    """Return weights in PyTorch's layout."""
    inner = SIDE - 4
    dense = made[4].reshape(inner, inner, CHANNELS[1], CLASSES).transpose(3, 2, 0, 1)
    kernels = [np.ascontiguousarray(kernel.transpose(3, 2, 0, 1)) for kernel in (made[0], made[2])]
    return [kernels[0], made[1], kernels[1], made[3], dense.reshape(CLASSES, -1).copy(), made[5]]


def from_torch(made: list[Array]) -> list[Array]:
    """Return PyTorch's weights in TensorFlow's layout."""
    inner = SIDE - 4
    dense = made[4].reshape(CLASSES, CHANNELS[1], inner, inner).transpose(2, 3, 1, 0)
    first, second = (kernel.transpose(2, 3, 1, 0) for kernel in (made[0], made[2]))
    return [first, made[1], second, made[3], dense.reshape(-1, CLASSES), made[5]]
