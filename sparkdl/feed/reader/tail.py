"""The end of an epoch: how many steps nodes take, and how many rows the last batches have.

Runs in: anywhere. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Tail = Literal["short", "pad", "drop", "carry"]


def agreed_steps(rows: Sequence[int], batch_size: int, tail: Tail) -> int:
    """Return the number of steps that every node takes in an epoch.

    Args:
        rows: how many rows each node has.
        batch_size: rows per node and step.
        tail: `short` and `pad` use all rows; `drop` and `carry` take full batches only.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    if tail in ("short", "pad"):
        return max((-(-count // batch_size) for count in rows), default=0)
    return min((count // batch_size for count in rows), default=0)


def next_share(rows_left: int, steps_left: int, batch_size: int) -> int:
    """Return the size of the next batch, such that rows are left for the steps after it.

    Full batches first; then as many rows as leave one for each later step. Zero only if fewer rows
    are left than steps, for the last of these.
    """
    if rows_left < steps_left:
        return min(1, rows_left)
    return min(batch_size, rows_left - (steps_left - 1))
