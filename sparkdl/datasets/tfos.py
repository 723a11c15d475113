"""TensorFlowOnSpark's `DataFeed`: rows of Spark partitions, one list at a time.

https://github.com/yahoo/TensorFlowOnSpark/blob/v2.2.5/tensorflowonspark/TFNode.py
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparkdl.control.channel import Local, Results
from sparkdl.control.messages import EpochEnd
from sparkdl.core.errors import InferenceError
from sparkdl.feed.reader.consumed import Part, part_of
from sparkdl.feed.reader.cursor import Item
from sparkdl.feed.reader.reader import FeedReader
from sparkdl.feed.store.segment import write_segment
from sparkdl.values.rows import encode_rows, rows

SendLocal = Callable[[Local, int], None]


class DataFeed:
    """Gives `map_fun` the rows that Spark feeds to this node.

    Args:
        train_mode: in training, batches run across partitions; in inference, a batch ends with its
            partition, and `batch_results` answers one result for each row.
        input_mapping: column name to tensor name. Batches are then dicts from tensor name to the
            list of the column's values, in the order of the sorted column names. Rows without
            column names must have their values in this order.

    Attributes:
        done_feeding: whether the end of the feed has been read.
    """

    def __init__(
        self,
        reader: FeedReader,
        send: SendLocal,
        train_mode: bool = True,
        input_mapping: Mapping[str, str] | None = None,
    ) -> None:
        self.train_mode = train_mode
        self.done_feeding = False
        self.input_tensors = (
            [tensor for _, tensor in sorted(input_mapping.items())] if input_mapping else None
        )
        self._columns = sorted(input_mapping) if input_mapping else []
        self._reader = reader
        self._send = send
        if not train_mode:
            reader.wait_forever()
        self._owner = reader.claim()
        self._rows: list[Any] = []
        self._next = 0
        self._item: Item | None = None
        self._parts: list[Part] = []
        self._exchange = ""
        self._unanswered: deque[tuple[str, int]] = deque()

    def next_batch(self, batch_size: int) -> Any:
        """Wait for `batch_size` rows and return them.

        Fewer come back at the end of the feed and, in inference mode, of a partition; the list is
        empty only at the end of the feed.

        Raises:
            InferenceError: in inference mode, if rows of one partition are still unanswered when
                those of another are due: their results would go to the wrong rows.
        """
        batch: list[Any] = []
        self._parts = []
        while len(batch) < batch_size and not self.done_feeding:
            if self._next < len(self._rows):
                self._move_rows(batch, batch_size - len(batch))
                continue
            item = self._reader.take(self._owner, with_exchange=True)
            if isinstance(item, Item):
                segment, was = item.segment, self._exchange
                self._item, self._exchange = item, segment.exchange
                self._rows, self._next = rows(item.batch()), item.skip
                # An empty segment marks the end of a partition of inference. It has no rows whose
                # answer would release it.
                if not segment.rows:
                    self._reader.answer_taken(item)
                # A batch of one partition only: its results go back to the task that sent the rows.
                is_other = segment.is_last or segment.exchange != was
                if is_other and batch and not self.train_mode:
                    break
            elif isinstance(item, EpochEnd):
                self._reader.finish_epoch(self._owner)
                if not item.goes_on:
                    self._reader.registry.watch.epoch_over(self._reader.feed)
                    self._reader.registry.watch.look()
            else:
                self.done_feeding = True
        made = self._by_tensor(batch) if self.input_tensors is not None else batch
        if self._parts:
            self._reader.note_batch(self._parts)
        return made

    def should_stop(self) -> bool:
        """Whether the end of the feed has been read."""
        return self.done_feeding

    def batch_results(self, results: Sequence[Any]) -> None:
        """Answer the oldest unanswered rows, one result each, in order.

        Raises:
            InferenceError: if there are more results than unanswered rows.
        """
        start = 0
        while start < len(results):
            if not self._unanswered:
                raise InferenceError(
                    f"batch_results was given {len(results)} results for {start} unanswered rows; "
                    "give exactly one result for each row of inference"
                )
            exchange, unanswered = self._unanswered.popleft()
            stop = min(len(results), start + unanswered)
            if unanswered > stop - start:
                self._unanswered.appendleft((exchange, unanswered - (stop - start)))
            self._answer(exchange, results[start:stop])
            start = stop

    def terminate(self) -> None:
        """Take no more rows: the Spark job that feeds this node ends early."""
        self._rows, self._next = [], 0
        self._reader.terminate()

    def _raise_if_results_are_missing(self) -> None:
        rows = sum(count for name, count in self._unanswered if name != self._exchange)
        if rows and not self.train_mode:
            raise InferenceError(
                f"{rows} rows of one partition have no result, and map_fun reads on to another; "
                "give batch_results exactly one result for each row, before the next next_batch"
            )

    def _move_rows(self, batch: list[Any], count: int) -> None:
        stop = min(len(self._rows), self._next + count)
        moved = stop - self._next
        batch.extend(self._rows[self._next : stop])
        self._next = stop
        if self._exchange:
            self._raise_if_results_are_missing()
            self._unanswered.append((self._exchange, moved))
            if stop == len(self._rows) and self._item:
                self._reader.answer_taken(self._item)
        else:
            # For good: a second DataFeed goes on behind these rows, as TensorFlowOnSpark's does.
            self._reader.give_for_good(self._owner, moved)
            if self._item:
                self._parts += part_of(self._item.origin, stop - moved, stop)

    def _answer(self, exchange: str, results: Sequence[Any]) -> None:
        for encoded in encode_rows(results):
            fd, _nbytes = write_segment(encoded)
            try:
                self._send(Results(exchange, encoded.num_rows), fd)
            finally:
                os.close(fd)

    def _by_tensor(self, batch: list[Any]) -> dict[str, list[Any]]:
        assert self.input_tensors is not None
        if batch and (hasattr(batch[0], "__fields__") or isinstance(batch[0], dict)):
            values = [[row[column] for row in batch] for column in self._columns]
        else:
            values = [[row[i] for row in batch] for i in range(len(self._columns))]
        return dict(zip(self.input_tensors, values, strict=True))
