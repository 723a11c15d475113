"""Rows that all nodes of a model-parallel group get: each reads its own, and they exchange them.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from sparkdl.core.errors import ConfigError
from sparkdl.feed.adapters.mesh import same_rows
from sparkdl.feed.adapters.shared_columns import Plain

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh


class SharedRows:
    """The nodes that differ in no data axis of a mesh, and so compute on the same rows.

    All nodes of the mesh make one, and exchange the same number of batches. The exchange has a
    process group of its own, of gloo: rows are in the host's memory, and no collective of the
    training comes in between.

    Attributes:
        members: how many nodes share a batch.
    """

    def __init__(self, mesh: DeviceMesh, data_axes: str | Sequence[str]) -> None:
        """See the class.

        Raises:
            ConfigError: if the mesh has no such axes, or is not over all nodes that train.
        """
        from torch import distributed

        names = mesh.mesh_dim_names or ()
        axes = [data_axes] if isinstance(data_axes, str) else data_axes
        groups = same_rows(mesh.mesh.numpy(), names, axes)
        nodes = distributed.get_world_size()
        if mesh.mesh.numel() != nodes:
            raise ConfigError(
                f"the mesh has {mesh.mesh.numel()} places, and {nodes} nodes train: rows can be "
                "shared over all of them only, as ctx.mesh(...) makes it"
            )
        self.members = len(groups[0])
        self._group: Any = None
        if self.members > 1:
            self._group, _ = distributed.new_subgroups_by_enumeration(groups, backend="gloo")

    def share_of(self, batch_size: int) -> int:
        """Return how many rows this node reads for a batch.

        Raises:
            ConfigError: if they cannot be the same number on all.
        """
        if batch_size % self.members:
            raise ConfigError(
                f"batch_size={batch_size} cannot be divided among the {self.members} nodes that "
                "compute on the same rows: each of them reads an equal share"
            )
        return batch_size // self.members

    def in_step(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of `ctx.batches` with `even=True`.

        Raises:
            ConfigError: if they say otherwise.
        """
        if options.get("even") is False:
            raise ConfigError(
                "even=False: with mesh=... the nodes exchange rows in each step, so all of them "
                "take the same number of steps. Leave it out"
            )
        return {**options, "even": True}

    def exchange(self, columns: Plain) -> Plain:
        """Return the rows that all members have read, in their order, on each of them."""
        if self.members == 1:
            return columns
        sent = {name: _packed(column) for name, column in columns.items()}
        own = np.array([[len(array) for array in sent.values()]], np.int64)
        lengths = np.concatenate(self._gathered(own, [1] * self.members))
        found: Plain = {}
        for (name, array), counts in zip(sent.items(), lengths.T.tolist(), strict=True):
            parts = self._gathered(array, counts)
            if isinstance(columns[name], list):
                found[name] = [value for part in parts for value in _texts(part)]
            else:
                found[name] = np.concatenate(parts)
        return found

    def _gathered(self, array: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
        """Return each member's array; they differ in the first dimension alone.

        Args:
            counts: the first dimension of each.
        """
        from torch import distributed

        sent = np.zeros((max(counts), *array.shape[1:]), array.dtype)
        sent[: len(array)] = array
        found = np.empty((self.members, *sent.shape), array.dtype)
        distributed.all_gather_into_tensor(_bytes(found), _bytes(sent), group=self._group)
        return [part[:count] for part, count in zip(found, counts, strict=True)]


def _packed(column: np.ndarray | list[Any]) -> np.ndarray:
    if not isinstance(column, list):
        return column
    return np.frombuffer(msgspec.msgpack.encode(column), np.uint8)


def _texts(packed: np.ndarray) -> list[str | bytes | None]:
    texts: list[str | bytes | None] = msgspec.msgpack.decode(packed.tobytes())
    return texts


def _bytes(array: np.ndarray) -> torch.Tensor:
    """Return an array's memory: gloo does not know all of numpy's types."""
    import torch

    return torch.from_numpy(array.reshape(-1).view(np.uint8))
