"""Global arrays of JAX from the rows that each process reads.

Runs in: child

Processes that hold the same rows, because they differ in an axis of the model alone, read an equal
share each. These are put together as if the model's axes split the rows as well, and JAX moves them
to where the sharding wants them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.core.errors import ConfigError, FeedTypeError

if TYPE_CHECKING:
    import jax


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
        """Find out who holds which rows.

        Raises:
            ConfigError: if the processes cannot be put into groups of one size that hold the same.
        """
        import jax

        parts: dict[int, set[int]] = {}
        devices = len(sharding.device_set)
        for device, (rows,) in _of_rows(sharding).devices_indices_map((devices,)).items():
            parts.setdefault(device.process_index, set()).add(rows.start or 0)
        groups = Counter(frozenset(held) for held in parts.values())
        own = frozenset(parts.get(jax.process_index(), ()))
        is_apart = sum(map(len, groups)) == len(frozenset().union(*groups))
        if (
            not own
            or not is_apart
            or len(set(groups.values())) > 1
            or len(set(map(len, groups))) > 1
        ):
            raise ConfigError(
                f"the devices of {len(parts)} nodes hold rows that overlap, or not equally many, "
                f"by {sharding}. Order them as ctx.mesh does: a node's devices beside each other"
            )
        return cls(sharding, len(parts), groups[own])

    def share_of(self, batch_size: int) -> int:
        """Return how many rows this process reads, of the `batch_size` that it holds.

        Raises:
            ConfigError: if they cannot be the same number in all.
        """
        if batch_size % self.members:
            raise ConfigError(
                f"batch_size={batch_size} cannot be divided among the {self.members} nodes that "
                "hold the same rows: each of them reads an equal share"
            )
        return batch_size // self.members

    def assemble(self, name: str, column: np.ndarray, share: int) -> jax.Array:
        """Return the global array `[rows, …]` of which this process has read `column`.

        Args:
            name: of the column.
            share: how many rows each process reads for a batch.

        Raises:
            ConfigError: if the sharding does not fit, or there are other than `share` rows.
        """
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
                f"by {self.sharding}: it must split the first dimension, and it alone, and the "
                f"batch size must be a multiple of a node's devices: {error}"
            ) from error
        return array if self.members == 1 else jax.jit(_same, out_shardings=self.sharding)(array)

    def held(self, name: str, column: np.ndarray, share: int) -> np.ndarray:
        """Return the rows `[batch_size, …]` that this process holds of the global array.

        Raises:
            ConfigError: if there are other than `share` rows.
        """
        if self.members == 1 and len(column) == share:
            return column
        array = self.assemble(name, column, share)
        shards = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
        return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)])


def numbers(name: str, column: np.ndarray) -> np.ndarray:
    """Return the column in the type that JAX gives it.

    Raises:
        FeedTypeError: if it has none.
    """
    import jax

    if column.dtype.kind not in "biufc":
        raise FeedTypeError(
            f"column {name!r} is of type {column.dtype}, and JAX has arrays of numbers only. Name "
            "the columns you want, or feed it as numbers"
        )
    return column.astype(jax.dtypes.canonicalize_dtype(column.dtype), copy=False)


def _same(array: Any) -> Any:
    return array


def _of_rows(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Return how the first dimension alone is split."""
    from jax.sharding import NamedSharding, PartitionSpec

    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))


def _spread(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Return the sharding that splits the rows over all axes, those of the data first.

    Raises:
        ConfigError: if the sharding has no axes.
    """
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
