"""The axes of a mesh: their lengths, the ranks with the same rows, and the share each reads.

Runs in: child. Pure.

A mesh is an array of devices, row by row: ranks that differ in the last axis alone are neighbours.
The axis with the most communication, usually the model's, should therefore come last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from sparkdl.core.errors import ConfigError


def axis_sizes(axes: Mapping[str, int], there: int, what: str) -> dict[str, int]:
    """Return the length of each axis; -1 is as long as the others leave of those that are `there`.

    Args:
        what: they are, for the error: "nodes that train".
    """
    asked = ", ".join(f"{name}={size}" for name, size in axes.items())
    if not axes:
        raise ConfigError("a mesh needs axes: ctx.mesh(data=2, model=2)")
    # Not by `isinstance`, for which True is a number.
    if any(type(size) is not int or (size < 1 and size != -1) for size in axes.values()):
        raise ConfigError(f"mesh({asked}): each axis must be 1 or more, or -1 for the rest")
    free = [name for name, size in axes.items() if size == -1]
    if len(free) > 1:
        raise ConfigError(f"mesh({asked}): only one axis can be -1, for what the others leave")
    known = math.prod(size for size in axes.values() if size != -1)
    if free and there % known:
        raise ConfigError(
            f"mesh({asked}): {there} {what} cannot be divided by {known}, so {free[0]} has no "
            "length; change an axis, or the number of nodes"
        )
    if not free and known != there:
        raise ConfigError(
            f"mesh({asked}) has {known} places, and there are {there} {what}: change an axis, or "
            "the number of nodes; -1 for one axis takes what the others leave"
        )
    return {name: there // known if size == -1 else size for name, size in axes.items()}


def same_rows(ranks: np.ndarray, names: Sequence[str], data_axes: Sequence[str]) -> list[list[int]]:
    """Return the groups of ranks that hold the same rows: they differ in no axis of the data.

    Args:
        ranks: of the mesh, one dimension for each of the axes' `names`.
    """
    unknown = [name for name in data_axes if name not in names]
    if unknown:
        raise ConfigError(
            f"the mesh has no axis {', '.join(map(repr, unknown))}; it has {', '.join(names)}: "
            "name the one along which the rows differ, data_axis=..."
        )
    order = [names.index(name) for name in data_axes]
    order += [axis for axis in range(len(names)) if axis not in order]
    groups = math.prod(ranks.shape[names.index(name)] for name in data_axes)
    # The axes of the data come first, so each line of the new shape is a group.
    found: list[list[int]] = ranks.transpose(order).reshape(groups, -1).tolist()
    return found


def equal_share(batch_size: int, members: int) -> int:
    """Return how many of a batch's rows each of the `members` reads that hold the same rows."""
    if batch_size % members:
        raise ConfigError(
            f"batch_size={batch_size} cannot be divided among the {members} nodes that hold the "
            "same rows: each of them reads an equal share"
        )
    return batch_size // members
