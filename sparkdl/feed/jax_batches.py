"""A feed as arrays of JAX, on this node's device or sharded over all nodes' devices.

Runs in: child
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.core.errors import ConfigError, FeedTypeError
from sparkdl.feed.elements import Names, arrange
from sparkdl.feed.epoch import EpochBatches

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class JaxBatches:
    """Each `iter` is one epoch of batches whose columns are `jax.Array`.

    Elements are `(x, y)`; `x` alone without `y`; a dict of all columns without both. A batch with
    the column "sample_weight" that neither names has it as another element at the end: 0 for rows
    that only fill the batch up. Losses must be weighted with it.

    Without a sharding, arrays are `[rows, …]` on this process's default device. With one that spans
    the devices of several processes (after `jax.distributed.initialize`), each of these gives its
    rows, and arrays are `[batch_size * processes, …]`, each one's on its own devices. The sharding
    must split the first axis over all processes, and every process must make the same steps, of
    batches that are always full: `tail="pad"` and `even=True`.

    JAX compiles anew for each shape, so full batches are better in one process as well. Without
    `jax_enable_x64`, 64-bit numbers become 32-bit ones, as in `jnp.asarray`: larger integers lose
    their high bits, floats digits.

    While a batch is used the next ones are on their way to the device already. An iteration that
    is left early gives those back with the rest of its epoch, as `ctx.batches` does, unless
    they were the epoch's last: then up to `prefetch` batches are lost.

    Attributes:
        x: column of the features, or several columns for a dict of features.
        y: column or columns of the labels.
        sharding: for all columns, so its spec names the first axis alone, like `P("data")`.
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

        array = _numbers(name, column)
        if self.sharding is None:
            return jax.device_put(array)
        processes = len({device.process_index for device in self.sharding.device_set})
        if processes > 1 and len(array) != self.batches.batch_size:
            raise ConfigError(
                f"a batch has {len(array)} rows instead of {self.batches.batch_size}, and the "
                "other nodes cannot know that. Use tail='pad'"
            )
        shape = (len(array) * processes, *array.shape[1:])
        try:
            return jax.make_array_from_process_local_data(self.sharding, array, shape)
        except ValueError as error:
            raise ConfigError(
                f"column {name!r} {list(array.shape)} of {processes} nodes cannot be sharded by "
                f"{self.sharding}, which must split the first axis, and it alone, over all of "
                f"them; the batch size must be a multiple of a node's devices: {error}"
            ) from error


def _numbers(name: str, column: np.ndarray) -> np.ndarray:
    """Return the column in the type that JAX gives it."""
    import jax

    if column.dtype.kind not in "biufc":
        raise FeedTypeError(
            f"column {name!r} is of type {column.dtype}, and JAX has arrays of numbers only. Name "
            "the columns you want, or feed it as numbers"
        )
    return column.astype(jax.dtypes.canonicalize_dtype(column.dtype), copy=False)
