"""What children compute with each library, with all of its threads.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from sparkdl.node.context import NodeContext

SIZE = 512
"""Of a product that libraries share out among threads."""


def operands(seed: int) -> tuple[Any, Any]:
    """Return two matrices, float32 [SIZE, SIZE]."""
    draw = np.random.default_rng(seed)
    return draw.random((SIZE, SIZE), np.float32), draw.random((SIZE, SIZE), np.float32)


def product(args: tuple[str, int], ctx: NodeContext) -> list[float]:
    """Return the sums of the columns of a product, by the library that `args` names.

    Args:
        args: the library, and the seed of the operands.
    """
    library, seed = args
    return [float(each) for each in _BY[library](*operands(seed))]


def _numpy(a: Any, b: Any) -> Any:
    return (a @ b).sum(0)


def _torch(a: Any, b: Any) -> Any:
    import torch

    image = torch.ones(2, 3, 64, 64, requires_grad=True)
    torch.nn.functional.conv2d(image, torch.ones(4, 3, 3, 3)).sum().backward()
    assert image.grad is not None
    assert float(image.grad[1, 2, 32, 32]) == 4 * 3 * 3
    return (torch.from_numpy(a) @ torch.from_numpy(b)).sum(0)


def _tensorflow(a: Any, b: Any) -> Any:
    import tensorflow as tf

    squares = tf.data.Dataset.range(8).map(lambda i: i * i, num_parallel_calls=4)
    assert sum(int(square) for square in squares) == sum(i * i for i in range(8))
    return tf.function(lambda a, b: tf.reduce_sum(a @ b, 0))(a, b)


def _jax(a: Any, b: Any) -> Any:
    import jax

    def total(a: Any) -> Any:
        sums = (a @ b).sum(0)
        return sums.sum(), sums

    (_, sums), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(a)
    assert np.allclose(gradient, np.tile(b.sum(1), (SIZE, 1)), 1e-4)
    return sums


def _keras(a: Any, b: Any) -> Any:
    import keras

    model = keras.Sequential([keras.Input((SIZE,)), keras.layers.Dense(SIZE, use_bias=False)])
    model.set_weights([b])
    return model.predict_on_batch(a).sum(0)


def _transformers(a: Any, b: Any) -> Any:
    import torch

    tokenizers, transformers = import_module("tokenizers"), import_module("transformers")
    words = tokenizers.models.WordLevel({"no": 0, "yes": 1}, unk_token="no")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokens = [line.ids for line in tokenizer.encode_batch(["yes no yes maybe"] * 256)]
    assert tokens == [[1, 0, 1, 0]] * 256
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.BertModel(
        transformers.BertConfig(vocab_size=2, intermediate_size=64, **small)
    )
    model(torch.tensor(tokens)).last_hidden_state.sum().backward()
    return _torch(a, b)


_BY: dict[str, Callable[[Any, Any], Any]] = {
    "numpy": _numpy,
    "torch": _torch,
    "tensorflow": _tensorflow,
    "jax": _jax,
    "keras": _keras,
    "transformers": _transformers,
}
