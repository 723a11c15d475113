"""What tasks found, added up: gradients or weights as one vector, metrics, and whose are missing.

Runs in: feeder, driver
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

import numpy as np

from sparkdl.feed.values.ndarrays import Array

Aggregation = Literal["tree", "slices"]
DIRECT = 4
"""So many partitions are added by the driver itself: a shuffle would cost more."""


@dataclass(frozen=True)
class Sum:
    """The sum of what some partitions found; addition in the order of partitions is exact.

    Attributes:
        first: the lowest of the partitions.
        weight: rows, by which the partitions' averages are weighted.
        vector: floats `[n]`: the sum of weight times average; None if there was no row.
        exact: whole numbers, which are alike on all partitions.
        metrics: states of metrics, which add up.
        missing: partitions whose rows are not on the executor where their task ran.
    """

    first: int
    weight: float = 0.0
    vector: Array | None = None
    exact: tuple[Array, ...] = ()
    metrics: tuple[Array, ...] = ()
    missing: tuple[int, ...] = ()

    def __add__(self, other: Sum) -> Sum:
        vectors = [v for v in (self.vector, other.vector) if v is not None]
        metrics = self.metrics or other.metrics
        if self.metrics and other.metrics:
            metrics = tuple(a + b for a, b in zip(self.metrics, other.metrics, strict=True))
        return Sum(
            self.first,
            self.weight + other.weight,
            reduce(np.add, vectors) if vectors else None,
            self.exact or other.exact,
            metrics,
            (*self.missing, *other.missing),
        )


def total(sums: Iterable[Sum]) -> Sum:
    """Return the sum, added in the order of partitions, whatever order they came in."""
    first, *others = sorted(sums, key=lambda each: each.first)
    return reduce(lambda a, b: a + b, others, first)


def num_groups(aggregation: Aggregation, partitions: int) -> int:
    """Return into how many groups (`tree`) or slices the sums go on executors; 0 for none.

    `tree`: the square root of the partitions, as a tree of depth 2. `slices`: as many as
    partitions, so that each task adds one slice of all vectors, as BigDL's parameter manager does
    (https://arxiv.org/abs/1804.05839, section 3.3).
    """
    if aggregation == "slices":
        return partitions if partitions > 1 else 0
    return int(np.ceil(np.sqrt(partitions))) if partitions > DIRECT else 0


def parts(found: Sum, aggregation: Aggregation, groups: int) -> Iterator[tuple[int, Sum]]:
    """Yield what goes to which group or slice."""
    if aggregation == "tree" or not groups:
        yield found.first % max(1, groups), found
        return
    cuts: Sequence[Array | None] = [None] * groups
    if found.vector is not None:
        cuts = np.array_split(found.vector, groups)
    yield 0, replace(found, vector=cuts[0])
    for number, cut in enumerate(cuts[1:], start=1):
        yield number, Sum(found.first, vector=cut)


def added(pairs: Iterable[tuple[int, Sum]]) -> Iterator[tuple[int, Sum]]:
    """Add up a group's sums."""
    found = list(pairs)
    if found:
        yield found[0][0], total(each for _, each in found)


def joined(pairs: Iterable[tuple[int, Sum]], aggregation: Aggregation) -> Sum:
    """Return the whole from groups or slices."""
    ordered = [each for _, each in sorted(pairs, key=lambda pair: pair[0])]
    if aggregation == "tree":
        return total(ordered)
    cuts = [each.vector for each in ordered if each.vector is not None]
    return replace(ordered[0], vector=np.concatenate(cuts) if cuts else None)


def pack(arrays: Sequence[Array]) -> tuple[Array, tuple[Array, ...]]:
    """Return the floats of `arrays` as one vector, float64 if one of them is; and the others."""
    floats = [array for array in arrays if is_float(array)]
    wide = any(array.dtype == np.float64 for array in floats)
    dtype = np.float64 if wide else np.float32
    flat = [np.asarray(array, dtype).ravel() for array in floats]
    vector = np.concatenate(flat) if flat else np.zeros(0, dtype)
    return vector, tuple(array for array in arrays if not is_float(array))


def unpack(vector: Array, exact: Sequence[Array], like: Sequence[Array]) -> list[Array]:
    """Return the arrays that `pack` was given, of the shapes and dtypes of `like`."""
    found, at, others = [], 0, iter(exact)
    for array in like:
        if is_float(array):
            values = vector[at : at + array.size]
            found.append(values.reshape(array.shape).astype(array.dtype, copy=False))
            at += array.size
        else:
            found.append(next(others))
    return found


def is_float(array: Array) -> bool:
    """Whether an array holds floats, bfloat16 included (which numpy itself does not know)."""
    return array.dtype.kind == "f" or array.dtype.name in ("bfloat16", "float8_e4m3fn")
