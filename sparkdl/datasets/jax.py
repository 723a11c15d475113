"""A feed as arrays of JAX, on this node's device or sharded over all nodes' devices.

Processes that hold the same rows, because they differ in an axis of the model alone, read an equal
share each. These are put together as if the model's axes split the rows as well, and JAX moves them
to where the sharding wants them. Keras makes global arrays itself, out of the rows that each
process holds by its distribution, so it is given just these, as arrays of numpy.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.core.errors import ConfigError, FeedTypeError, FrameworkMissingError
from sparkdl.datasets.keras_epochs import patch_fit_for_feeds
from sparkdl.datasets.mesh import equal_share
from sparkdl.datasets.tensorflow import Fed
from sparkdl.feed.reader.batches import EpochBatches, Names, arrange
from sparkdl.values.columns import is_csr, places
from sparkdl.values.tensors import as_numbers, check_shared, no_sparse, no_tensor

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class JaxBatches:
    """Each `iter` is one epoch of batches whose columns are `jax.Array`.

    Elements are `(x, y)`; `x` alone without `y`; a dict of all columns without both. A column
    "sample_weight" that neither `x` nor `y` names is appended as the last element: 0 for rows that
    only fill the batch up. Losses must be weighted with it.

    Without a sharding, arrays are `[rows, …]` on this process's default device. With one over the
    devices of several processes, as `framework="jax"` has them, arrays are global. `batch_size`
    counts the rows on the devices of one process. Processes may form groups with the same rows; the
    arrays have `batch_size` rows per group, read by all processes in equal shares. Every process
    must make the same steps, of batches that are always full: `tail="pad"`, `even=True`.

    JAX compiles again for each shape, so full batches are better in one process as well. Without
    `jax_enable_x64`, 64-bit numbers become 32-bit ones, as in `jnp.asarray`: larger integers lose
    their high bits, floats digits.

    While a batch is used the next ones are on their way to the device already. An iteration that
    is left early gives those back with the rest of its epoch, as `ctx.batches` does.

    Attributes:
        x: column of the features, or several columns for a dict of features.
        y: column or columns of the labels.
        batches: of the share that this process reads, see `equal_share`.
        sharding: for all columns, so its spec names only the first dimension, like `P("data")`.
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
        if self._global is not None:
            no_sparse(self.batches.sparse, "with sharding=...")
        if self._global is not None and self._global.processes > 1:
            check_shared(self.batches.pad)

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
        if self.sharding is not None:
            raise ConfigError("Keras shards its training data itself: leave out sharding=...")
        no_sparse(self.batches.sparse, "in Keras on JAX")
        return keras_data(self.batches, self.x, self.y)

    def __iter__(self) -> Iterator[Any]:
        ahead: deque[Any] = deque()
        for columns in (steps := self.batches.ahead()):
            if columns is None:
                break
            arrays = {name: self._put(name, column) for name, column in columns.items()}
            ahead.append(arrange(arrays, self.x, self.y))
            # Views of a batch keep its segment mapped while the next one is waited for.
            del columns, arrays
            if len(ahead) > self.prefetch:
                self.batches.reader.read_ahead(self.prefetch)
                yield ahead.popleft()
        while ahead:
            self.batches.reader.read_ahead(len(ahead) - 1)
            yield ahead.popleft()
        next(steps, None)

    def _put(self, name: str, column: np.ndarray) -> Any:
        """Begin to copy a column to its device or devices."""
        import jax

        if is_csr(column):
            return _sparse(name, column)
        array = numbers(name, column)
        if self._global is None:
            return jax.device_put(array)
        return self._global.assemble(name, array, self.batches.batch_size)


@dataclass(frozen=True)
class GlobalRows:
    """Where the rows of global arrays come from.

    Attributes:
        sharding: of the arrays, which may split their first dimension.
        processes: how many have devices in it.
        members: how many of them hold the same rows as this one, itself included.
    """

    sharding: jax.sharding.Sharding
    processes: int
    members: int

    @classmethod
    def of(cls, sharding: jax.sharding.Sharding) -> GlobalRows:
        """Find out which rows the devices of each process hold: groups of them hold the same."""
        import jax

        parts: dict[int, set[int]] = {}
        # An array of one row a device shows which rows each device holds.
        devices = len(sharding.device_set)
        for device, (rows,) in _of_rows(sharding).devices_indices_map((devices,)).items():
            # A device with all rows has a slice without a start.
            parts.setdefault(device.process_index, set()).add(rows.start or 0)
        groups = Counter(frozenset(held) for held in parts.values())
        own = frozenset(parts.get(jax.process_index(), ()))
        is_apart = sum(map(len, groups)) == len(frozenset().union(*groups))
        are_equal = len(set(groups.values())) == len(set(map(len, groups))) == 1
        if not (own and is_apart and are_equal):
            raise ConfigError(
                f"by {sharding} the devices of {len(parts)} nodes hold overlapping rows, or "
                "unequal numbers of them. Order them as ctx.mesh does, a node's devices together"
            )
        return cls(sharding, len(parts), groups[own])

    def assemble(self, name: str, column: np.ndarray, share: int) -> jax.Array:
        """Return the global array `[rows, …]` with `column` as this process's share of rows."""
        import jax

        if self.processes > 1 and len(column) != share:
            raise ConfigError(
                f"a batch has {len(column)} rows instead of {share}, and the other nodes cannot "
                "know that. Use tail='pad'"
            )
        shape = (len(column) * self.processes, *column.shape[1:])
        spread = self.sharding if self.members == 1 else _spread(self.sharding)
        try:
            array = jax.make_array_from_process_local_data(spread, column, shape)
        except ValueError as error:
            raise ConfigError(
                f"column {name!r} {list(column.shape)} of {self.processes} nodes cannot be sharded "
                f"by {self.sharding}: it must split only the first dimension, and the "
                f"batch size must be a multiple of a node's devices: {error}"
            ) from error
        # A function of the module, because jit compiles again for each new function.
        return array if self.members == 1 else jax.jit(_same, out_shardings=self.sharding)(array)

    def held(self, name: str, column: np.ndarray, share: int) -> np.ndarray:
        """Return the rows `[batch_size, …]` that this process holds of the global array."""
        if self.members == 1 and len(column) == share:
            return column
        array = self.assemble(name, column, share)
        # By start, because several devices of this process may hold the same rows.
        shards = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
        return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)])


def numbers(name: str, column: np.ndarray) -> np.ndarray:
    """Return the column in the type that JAX gives it."""
    import jax

    array = as_numbers(name, column)
    if array.dtype.kind not in "biufc":
        raise no_tensor(name, column, "JAX")
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    # Only times differ from `column` here: other integers lose their high bits, as documented.
    if array is not column and (array != array.astype(dtype)).any():
        raise FeedTypeError(
            f"column {name!r}: microseconds take 64 bits: set jax_enable_x64, or feed seconds"
        )
    return array.astype(dtype, copy=False)


def _sparse(name: str, column: Any) -> Any:
    """Return a `csr_array` as a BCOO, filled up with places outside of it, which JAX ignores.

    The number of values is a power of two, because XLA compiles for each.
    """
    import jax
    from jax.experimental.sparse import BCOO

    many = 1 << max(0, column.nnz - 1).bit_length()
    where = np.tile(np.array(column.shape, np.int32), (many, 1))
    where[: column.nnz] = places(column)
    values = np.zeros(many, column.dtype)
    values[: column.nnz] = column.data
    parts = (jax.device_put(numbers(name, values)), jax.device_put(where))
    return BCOO(parts, shape=column.shape, indices_sorted=True, unique_indices=True)


def _same(array: Any) -> Any:
    return array


def _of_rows(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Return how the first dimension alone is split."""
    from jax.sharding import NamedSharding, PartitionSpec

    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))


def _spread(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Return the sharding that splits the rows over all axes, those of the data first."""
    from jax.sharding import NamedSharding, PartitionSpec

    if not isinstance(sharding, NamedSharding):
        raise ConfigError(
            f"{sharding} gives several nodes the same rows; write it as a NamedSharding over "
            "ctx.mesh(...)"
        )
    first = sharding.spec[0] if len(sharding.spec) else None
    data = () if first is None else (first,) if isinstance(first, str) else tuple(first)
    others = tuple(name for name in sharding.mesh.axis_names if name not in data)
    return NamedSharding(sharding.mesh, PartitionSpec((*data, *others)))


def keras_data(batches: EpochBatches, x: Names | None, y: Names | None) -> Any:
    """Return a data adapter of Keras, see `JaxBatches.as_keras`."""
    rows = _rows()
    if rows is not None:
        if rows.processes > 1:
            check_shared(batches.pad)
        batches = replace(batches, batch_size=equal_share(batches.batch_size, rows.members))
    patch_fit_for_feeds()

    def epoch() -> Iterator[Any]:
        for columns in batches:
            batches.reader.read_ahead(None)
            arrays = {name: numbers(name, column) for name, column in columns.items()}
            if rows is not None:
                share = batches.batch_size
                arrays = {name: rows.held(name, array, share) for name, array in arrays.items()}
            yield arrange(arrays, x, y)

    class FeedAdapter(_adapter(), Fed):  # type: ignore[misc]
        """Batches of an epoch whose length is unknown before its end."""

        num_batches = batch_size = has_partial_batch = partial_batch_size = None
        _dataset = property(lambda self: self)

        def get_jax_iterator(self) -> Iterator[Any]:
            return epoch()

        get_numpy_iterator = get_jax_iterator

    return FeedAdapter(batches)


def _adapter() -> Any:
    """Return the base class; Keras takes any data that is of it."""
    try:
        adapter = import_module("keras.src.trainers.data_adapters.data_adapter").DataAdapter
    except (ImportError, AttributeError) as error:
        raise FrameworkMissingError(
            f"this Keras cannot be fed: {error}. Install Keras 3.12 to 3.15"
        ) from error
    return adapter


def _rows() -> GlobalRows | None:
    """Return how Keras's distribution shards rows; `None` without one."""
    import jax

    keras = import_module("keras")
    if keras.backend.backend() != "jax":
        raise ConfigError(
            f"Keras uses {keras.backend.backend()}: set KERAS_BACKEND=jax before it is imported, "
            "which framework='jax' does unless it is set, or feed it by ctx.dataset"
        )
    distribution = keras.distribution.distribution()
    if distribution is not None:
        return GlobalRows.of(distribution.get_data_layout((1,)).backend_layout)
    if jax.process_count() > 1:
        raise ConfigError(
            "each node would train a separate model: call keras.distribution.set_distribution("
            "keras.distribution.DataParallel(auto_shard_dataset=False)) before the model is made"
        )
    return None
