"""Which node reads which rows of which Parquet row groups, each row exactly once.

Runs in: driver. Pure. A node gets its own files and ranges only, so that a share is small
enough for one control message.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from sparkdl.control.shares import DataFile, FileRange
from sparkdl.core.row_ranges import Range, uncovered


def plan(
    row_groups: Sequence[Sequence[int]],
    num_nodes: int,
    seed: int | None = None,
    epoch: int = 0,
    done: Sequence[Range] = (),
) -> list[list[FileRange]]:
    """Share out all rows but those that are `done` so that the nodes' totals differ by at most one.

    The row groups are laid end to end and cut into `num_nodes` lengths, so that at most
    `num_nodes - 1` row groups are read by two nodes or more. The same arguments give the same
    result, anywhere and always.

    Args:
        row_groups: for each file the rows of each of its row groups; `FileRange.file` counts them.
        num_nodes: at least 1.
        seed: shuffles the row groups first, differently in each epoch; None keeps their order,
            and with it each node's rows.
        epoch: has no meaning without a seed.
        done: numbers of rows, counted through all files.

    Returns:
        For each node its ranges, none of them empty.
    """
    if num_nodes < 1:
        raise ValueError(f"num_nodes is {num_nodes}; it must be at least 1")
    groups = list(_groups(row_groups))
    if seed is not None:
        random.Random(f"{seed}/{epoch}").shuffle(groups)
    left = [
        FileRange(part.file, part.row_group, first - part.first, last - part.first, first)
        for part in groups
        for first, last in uncovered(part.first, part.first + part.stop, done)
    ]
    total = sum(part.stop - part.start for part in left)
    shares: list[list[FileRange]] = [[] for _ in range(num_nodes)]
    node, offset = 0, 0
    for part in left:
        rows, start = part.stop - part.start, 0
        while start < rows:
            end = total * (node + 1) // num_nodes - offset  # of this node, within this range
            stop = min(rows, end)
            if start < stop:
                shares[node].append(
                    FileRange(
                        part.file,
                        part.row_group,
                        part.start + start,
                        part.start + stop,
                        part.first + start,
                    )
                )
                start = stop
            if stop == end:
                node += 1
        offset += rows
    return shares


def _groups(row_groups: Sequence[Sequence[int]]) -> Iterator[FileRange]:
    """Yield all row groups that are not empty, as ranges."""
    first = 0
    for file, counts in enumerate(row_groups):
        for group, rows in enumerate(counts):
            if rows:
                yield FileRange(file, group, 0, rows, first)
            first += rows


class RowNumbers:
    """Tells which rows of the data set the next rows of a share are.

    Args:
        ranges: of the share, in the order in which they are read.
    """

    def __init__(self, ranges: Iterable[FileRange]) -> None:
        self._left = deque((part.first, part.first + part.stop - part.start) for part in ranges)

    def take(self, rows: int) -> tuple[tuple[int, int, int], ...]:
        """Return the next `rows` rows: partition 0, first number, number past the last."""
        spans: list[tuple[int, int, int]] = []
        while rows > 0 and self._left:
            first, past = self._left.popleft()
            if past - first > rows:
                self._left.appendleft((first + rows, past))
                past = first + rows
            rows -= past - first
            if spans and spans[-1][2] == first:
                first = spans.pop()[1]
            spans.append((0, first, past))
        return tuple(spans)


def own_files(
    files: Sequence[DataFile], ranges: Sequence[FileRange]
) -> tuple[tuple[DataFile, ...], tuple[FileRange, ...]]:
    """Return the files that `ranges` name, once each, and the ranges as indices into those."""
    numbers: dict[int, int] = {}
    for part in ranges:
        numbers.setdefault(part.file, len(numbers))
    return tuple(files[file] for file in numbers), tuple(
        msgspec.structs.replace(part, file=numbers[part.file]) for part in ranges
    )
