"""What nodes tell of their feeds: counts of rows and steps, and short answers. Pure data.

Runs in: driver, agent, child
"""

from __future__ import annotations

from operator import sub

import msgspec


class Given(msgspec.Struct, frozen=True):
    """What user code of one node has been given of a feed, in all epochs of one child.

    Attributes:
        rows: rows that several epochs read count for each.
        epochs: every epoch with a smaller number is over.
        steps: batches.
        padded: rows given beyond these, to fill a step.
        dropped: rows not given because they filled no step.
        beyond: iterations that found the feed's end in place of an epoch.
        again: rows given in iterations that were left early, which `rows` does not count.
    """

    rows: int = 0
    epochs: int = 0
    steps: int = 0
    padded: int = 0
    dropped: int = 0
    beyond: int = 0
    again: int = 0

    @property
    def used(self) -> int:
        """Rows that user code waits for no longer."""
        return self.rows + self.dropped

    def __sub__(self, before: Given) -> Given:
        return Given(*map(sub, msgspec.structs.astuple(self), msgspec.structs.astuple(before)))


class EpochCount(msgspec.Struct, frozen=True):
    """A node's answer to `FeedCut` and `EpochEnd`: its rows of an epoch that takes no more.

    Attributes:
        epoch: the last such one, or -1.
        is_whole: all its rows are still here, and stay, so that they can be read again.
    """

    epoch: int = -1
    rows: int = 0
    is_whole: bool = False


class FeedCount(msgspec.Struct, frozen=True):
    """Rows of one feed at one node. Epochs are numbered over the whole life of the feed.

    Attributes:
        rows_received: since the node came up.
        given: what its user code has been given.
        waits: user code waits for a row, and has been given all rows that were received.
        began: the epoch of the last `FeedBegin`.
        epoch_rows: rows that are here of `epoch`.
        cut: its last answer.
        closed: the node takes no more rows, ever: its child has ended.
        closed_to: nor those of epochs up to this one: user code called `terminate`.
        problem: why the node's rows cannot come: a file cannot be read, or another agent's rows
            cannot be fetched.
    """

    feed: str
    rows_received: int = 0
    given: Given = Given()
    waits: bool = False
    began: int = -1
    epoch_rows: int = 0
    cut: EpochCount = EpochCount()
    closed: bool = False
    closed_to: int = -1
    problem: str = ""

    @property
    def epoch(self) -> int:
        """The epoch that is received: the one after the last cut, unless some were skipped."""
        return max(self.cut.epoch + 1, self.began, 0)
