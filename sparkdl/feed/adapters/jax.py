"""A feed as arrays of JAX, on this node's device or sharded over all nodes' devices.

Runs in: child
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.core.errors import ConfigError
from sparkdl.feed.adapters.elements import Names, arrange
from sparkdl.feed.adapters.jax_mesh import GlobalRows, numbers
from sparkdl.feed.reader.batches import EpochBatches

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class JaxBatches:
    """Each `iter` is one epoch of batches whose columns are `jax.Array`.

    Elements are `(x, y)`; `x` alone without `y`; a dict of all columns without both. A batch with
    the column "sample_weight" that neither names has it as another element at the end: 0 for rows
    that only fill the batch up. Losses must be weighted with it.

    Without a sharding, arrays are `[rows, …]` on this process's default device. With one over the
    devices of several processes, as `framework="jax"` has them, arrays are global. `batch_size` is
    how many rows the devices of one process hold, so the arrays have that many for each group of
    processes that hold the same rows. The rows come from all processes in equal shares. Every
    process must make the same steps, of batches that are always full: `tail="pad"`, `even=True`.

    JAX compiles anew for each shape, so full batches are better in one process as well. Without
    `jax_enable_x64`, 64-bit numbers become 32-bit ones, as in `jnp.asarray`: larger integers lose
    their high bits, floats digits.

    While a batch is used the next ones are on their way to the device already. An iteration that
    is left early gives those back with the rest of its epoch, as `ctx.batches` does, unless
    they were the epoch's last: then up to `prefetch` batches are lost.

    Attributes:
        x: column of the features, or several columns for a dict of features.
        y: column or columns of the labels.
        batches: of the share that this process reads, see `GlobalRows.share_of`.
        sharding: for all columns, so its spec names the first dimension alone, like `P("data")`.
        prefetch: how many batches to put onto the device in advance.
    """

    batches: EpochBatches
    x: Names | None = None
    y: Names | None = None
    sharding: jax.sharding.Sharding | None = None
    prefetch: int = 2

    def __post_init__(self) -> None:
        if self.prefetch < 0:
            raise ConfigError(f"prefetch={self.prefetch} must be at least 0")

    @cached_property
    def _global(self) -> GlobalRows | None:
        return None if self.sharding is None else GlobalRows.of(self.sharding)

    def as_keras(self) -> Any:
        """Return what `fit` and `evaluate` of Keras 3 on JAX take; each epoch is one of the feed.

        Call it after `keras.distribution.set_distribution`, which says how rows are sharded.

        Raises:
            ConfigError: if the nodes would train without each other, or the batch does not fit.
            FrameworkMissingError: if Keras is another.
        """
        from sparkdl.feed.adapters.keras_jax import keras_data

        if self.sharding is not None:
            raise ConfigError("Keras shards what it trains on: leave out sharding=...")
        return keras_data(self.batches, self.x, self.y)

    def __iter__(self) -> Iterator[Any]:
        ahead: deque[Any] = deque()
        for columns in self.batches:
            arrays = {name: self._put(name, column) for name, column in columns.items()}
            ahead.append(arrange(arrays, self.x, self.y))
            del columns, arrays
            if len(ahead) > self.prefetch:
                self.batches.reader.read_ahead(self.prefetch)
                yield ahead.popleft()
        while ahead:
            self.batches.reader.read_ahead(len(ahead) - 1)
            yield ahead.popleft()

    def _put(self, name: str, column: np.ndarray) -> jax.Array:
        """Begin to copy a column to its device or devices.

        Raises:
            ConfigError: if the sharding does not fit.
            FeedTypeError: if the column has no type of JAX.
        """
        import jax

        array = numbers(name, column)
        if self._global is None:
            return jax.device_put(array)
        return self._global.assemble(name, array, self.batches.batch_size)
