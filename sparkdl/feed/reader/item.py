"""A segment that has arrived at the child.

Runs in: child
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pyarrow as pa

from sparkdl.control.channel import Segment
from sparkdl.feed.store.segment import read_segment


@dataclass
class Item:
    """A segment that has arrived.

    Attributes:
        fd: open until the batch is first wanted; on disk, until the segment is released.
        skip: rows at its start that were used before an iteration was abandoned.
        epoch: in which it was taken last; several may read it.
        origin: where its rows lie among those of `ConsumedRows`, if these are wanted.
    """

    segment: Segment
    fd: int
    skip: int = 0
    epoch: int = -1
    origin: int | None = None
    is_released: bool = False
    _batch: pa.RecordBatch | None = None

    def batch(self) -> pa.RecordBatch:
        """Map the segment, without copying. From disk it is mapped for as long as it is used."""
        if self._batch is not None:
            return self._batch
        batch = read_segment(self.fd)
        if not self.segment.is_on_disk:
            self._batch = batch
            self.close()
        return batch

    def let_go(self) -> int | None:
        """Forget the batch; return the segment's number if it has not been released before."""
        self.close()
        self._batch = None
        return self._release()

    def keep(self) -> int | None:
        """Keep the batch, which the agent need not have any more; return as `let_go` does."""
        self.batch()
        return self._release()

    def _release(self) -> int | None:
        was_released, self.is_released = self.is_released, True
        return None if was_released else self.segment.number

    def close(self) -> None:
        """Close the descriptor; a batch that is mapped stays valid."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
