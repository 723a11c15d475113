"""What one call has left goes to a generation: a Spark job per pass, watched from another thread.

Runs in: driver
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from msgspec import structs

from sparkdl.control.messages import FeedBegin, FeedCount, Granted, ToAgent
from sparkdl.core.deadline import Deadline
from sparkdl.core.world import Member
from sparkdl.driver import state as states
from sparkdl.driver.controller import Controller, View
from sparkdl.driver.executors.executor import Executor
from sparkdl.driver.feeds.calls import Call, EpochLeft
from sparkdl.driver.feeds.epoch_ends import Cut, EpochEnds
from sparkdl.driver.feeds.progress import FeedBar
from sparkdl.driver.feeds.reading import read_at_nodes
from sparkdl.driver.feeds.report import Fed, FeedReport, report, waits_in_vain
from sparkdl.driver.feeds.watch import FeedWatch, NewWorldError
from sparkdl.driver.outcome import away_of, generation_of, is_decided
from sparkdl.feed.order import FedPartition, FeedOrder, Target
from sparkdl.feed.parquet import ParquetSource

_FETCH_S = 5.0
_BLAME_LINES = 10
_REFUSED = -1
"""Stands for a node's id where rows are counted that no node wanted."""


@dataclass(frozen=True)
class FeedCall:
    """Feeds one generation what a call has left, and where to turn for it.

    Attributes:
        members: the nodes that are fed.
        order: of its first epoch.
        measured: told what a pass over the data has brought.
        is_over: of a stream, whose micro-batch this call feeds: whether it is over.
        brought: rows by node id that the stream has brought before.
    """

    controller: Controller
    executor: Executor
    members: tuple[Member, ...]
    order: FeedOrder
    bar: FeedBar
    measured: Callable[[list[FedPartition]], None] = lambda fed: None
    is_over: Callable[[View], bool] | None = None
    brought: Mapping[int, int] = field(default_factory=dict)

    @property
    def goes_on(self) -> bool:
        """Whether the nodes read what this call feeds, and what the next one does, as one."""
        return self.is_over is not None

    def run(self, call: Call, left: Sequence[EpochLeft]) -> tuple[FeedReport, bool]:
        """Feed the rows of `left` until the nodes have read them, or want no more.

        Returns:
            What became of the rows, and whether the nodes wanted no more.

        Raises:
            NewWorldError: if another generation is to begin.
            NodeFailedError: if a node failed.
            FeedTimeoutError: if no row was received or read for the feed timeout.
            SparkdlError: if feeding failed otherwise.
        """
        feed, first = self.order.feed, self.order.epoch
        last = first + len(left) - 1
        covered = call.rows_covered
        before = self.controller.look(self.counts)
        # The epoch behind those of a stream's call ends the stream: see `StreamFeed.end`.
        begin = self._beginning(call, left, last + self.goes_on)
        self.broadcast(begin)
        expected = Counter(dict.fromkeys(before, 0))
        epoch, read_to, refused, passes = first, -1, 0, 0
        ends = EpochEnds(self)
        ahead = ends.held(first, self._is_renewed) if begin.run else self.order.ahead
        with self.bar, FeedWatch(self) as watch:
            try:
                while epoch <= last and (watch.is_counting or not watch.has_closed):
                    now = left[epoch - first]
                    # What is read from the logs again has to be there as a whole.
                    repeated = epoch + _whole_epochs(left[epoch - first :])
                    run = begin.run if epoch == first else ""
                    order = self._order_of(call, left[epoch - first : repeated - first + 1], run)
                    order = replace(order, epoch=epoch, last_epoch=last, ahead=ahead)
                    brought = self._deliver(call.asked.data, order, watch)
                    refused += brought[_REFUSED]
                    if watch.has_closed:
                        break
                    passes += 1
                    cut = ends.cut(epoch, watch.has_reason)
                    watch.raise_reason()
                    if now.done and not any(count.cut_rows for count in cut.values()):
                        epoch += 1
                        if epoch <= last:  # nothing was left of it: nobody is to see it
                            self.broadcast(FeedBegin(feed, epoch, last + self.goes_on))
                        continue
                    is_rest = bool(now.done)  # and may wait for the next epoch, see `EpochEnds`
                    ahead = {n: count.cut_rows for n, count in cut.items() if is_rest}
                    stop = repeated if all(c.cut_whole for c in cut.values()) else epoch
                    waits = ends.end(epoch, stop, cut, is_rest)
                    expected.update(_rows_had(brought, cut, stop + 1 - epoch))
                    epoch, read_to = stop + 1, read_to if waits else stop
                if read_to >= 0:
                    watch.wait_read(lambda view: self._has_read(view, read_to, before, expected))
            except NewWorldError:
                raise
            except BaseException:
                ends.end_early(epoch, last)
                raise
            if watch.has_closed:
                ends.end_early(epoch, last)
        fed = Fed(
            feed,
            epochs=call.asked.epochs - len(left) + min(epoch, last + 1) - first,
            passes=passes,
            rows_refused=refused,
            delivered={} if watch.has_closed else expected,
            rows_covered=covered,
            goes_on=self.goes_on and not watch.has_closed,
            is_cut=watch.is_cut and epoch <= last,
        )
        return self._report(fed, before), watch.has_closed

    def _report(self, fed: Fed, before: dict[int, FeedCount]) -> FeedReport:
        names = {m.node.node_id: m.node.name for m in self.members}
        after, gone = self.controller.look(lambda view: (self.counts(view), self.gone_nodes(view)))
        return report(replace(fed, left_by=gone), names, before, after)

    def _is_renewed(self) -> bool:
        return self.is_out_of_date(self.controller.view.state)

    def _beginning(self, call: Call, left: Sequence[EpochLeft], last: int) -> FeedBegin:
        """Return what the nodes are told first: also which rows they may use that they still have.

        Those that the generation before was brought, and no more than are to come to each, so that
        all nodes end with equally many.
        """
        run, limit = call.jobs.get(left[0].epoch, ""), 0
        if run and not isinstance(call.asked.data, ParquetSource):
            limit = call.part_of_each(left[0].done, len(self.members))
        begin = FeedBegin(self.order.feed, self.order.epoch, last)
        return structs.replace(begin, run=run, done=left[0].done, limit=limit) if limit else begin

    def _order_of(self, call: Call, left: Sequence[EpochLeft], run: str) -> FeedOrder:
        """Return what feeders are told of a pass over the data, which all epochs of `left` read.

        Args:
            run: the job's name, if it brings what nodes do not have any more.
        """
        done = left[0].done
        run = run or f"{call.run}.{self.order.generation}.{left[0].epoch}"
        call.jobs.update(dict.fromkeys([each.epoch for each in left], run))
        skipped = call.covered_partitions(done) if done else frozenset()
        keep = len(left) > 1
        return replace(self.order, run=run, keep=keep, done=done, skipped=skipped)

    def _deliver(self, data: Any, order: FeedOrder, watch: FeedWatch) -> Counter[int]:
        """Bring the rows of one epoch to the nodes.

        Returns:
            The rows that feeders brought by node id, and by `_REFUSED` those that no node wanted.
        """
        if isinstance(data, ParquetSource):
            return Counter({_REFUSED: read_at_nodes(self, data, order, watch)})
        fed: list[FedPartition] = watch.guard(partial(self.executor.feed, data, order))
        if not watch.has_closed:
            order.check_partitions(len(fed))
            self.measured(fed)
        brought: Counter[int] = Counter()
        for partition in fed:
            brought.update({**partition.rows, _REFUSED: partition.rows_refused})
        if brought[_REFUSED]:
            watch.wait_for_reason()  # which the nodes are about to tell
        return brought

    def broadcast(self, message: ToAgent) -> None:
        """Tell the nodes that are fed."""
        ids = {member.node.node_id for member in self.members}
        self.controller.broadcast(message, ids, self.order.generation)

    def cancel(self) -> None:
        """End the call's Spark job soon."""
        self.executor.cancel_feeds(self.order.feed)

    def is_out_of_date(self, state: Any) -> bool:
        """Whether the nodes began anew, or are about to, since the call began."""
        return generation_of(state) not in (None, self.order.generation)

    def counts(self, view: View) -> dict[int, FeedCount]:
        """Return what each fed node has received and read, by node id."""
        nothing = FeedCount(self.order.feed)
        return {
            member.node.node_id: view.feeds.get((member.node.node_id, self.order.feed), nothing)
            for member in self.members
        }

    def gone_nodes(self, view: View) -> set[int]:
        """Return the nodes that take no more rows, ever; none while what follows is undecided."""
        if not is_decided(view.state):
            return set()
        members = {member.node.node_id for member in self.members}
        if isinstance(view.state, states.Finished):
            return members  # those that have not returned are stopped
        closed = {node_id for node_id, count in self.counts(view).items() if count.closed}
        over = set(getattr(view.state, "returned", {})) | away_of(view.state)
        return closed | (over & members)

    def is_unwanted(self, view: View) -> bool:
        """Whether user code of a node has terminated this call, or all nodes are gone."""
        if self.is_over is not None and self.is_over(view):
            return True
        counts = self.counts(view).values()
        if is_decided(view.state) and any(c.closed_to >= self.order.epoch for c in counts):
            return True
        return len(self.gone_nodes(view)) == len(self.members)

    def is_left(self, view: View) -> bool:
        """Whether it is unwanted because all nodes have returned: nobody knows why."""
        return not self.goes_on and len(self.gone_nodes(view)) == len(self.members)

    def granted(self, view: View) -> Granted | None:
        """Return the rows that every node has of the epoch that is being fed."""
        gone = self.gone_nodes(view)
        counts = [count for node_id, count in self.counts(view).items() if node_id not in gone]
        if not counts or len({count.epoch for count in counts}) > 1:
            return None
        epoch, rows = counts[0].epoch, min(count.epoch_rows for count in counts)
        return Granted(self.order.feed, epoch, rows) if rows else None

    def _has_read(
        self,
        view: View,
        last: int,
        before: dict[int, FeedCount],
        expected: dict[int, int],
    ) -> bool:
        """Whether every node has read all that it was fed, or takes no more.

        Nobody is waited for while a stream has not brought each node a row. Who has none may wait
        for it, to learn the types, and the others for who has none.
        """
        gone = self.gone_nodes(view)
        if self.goes_on and any(
            node_id not in gone and not self.brought.get(node_id, 0) + rows
            for node_id, rows in expected.items()
        ):
            return True
        return all(
            node_id in gone
            or count.epochs_done > last
            or count.rows_consumed - before[node_id].rows_consumed >= expected[node_id] > 0
            for node_id, count in self.counts(view).items()
        )

    def blame(self, timeout_s: float) -> str:
        """Describe which node stands still, with its last log lines."""
        counts = self.controller.look(lambda view: self.counts(view))
        names = {member.node.node_id: member.node.name for member in self.members}
        behind = {
            n: c for n, c in counts.items() if c.rows_consumed < c.rows_received and not c.closed
        }
        node_id = min(behind or counts, key=lambda n: counts[n].rows_consumed)
        count, name = counts[node_id], names[node_id]
        lines = self.controller.fetch_log(node_id, _BLAME_LINES, Deadline.after(_FETCH_S))
        vain = self.controller.look(lambda view: waits_in_vain(self.controller.spec, view.feeds))
        tail = "".join(f"\n  | {line}" for line in lines) or " (nothing)"
        return (
            f"feed {self.order.feed!r} made no progress for {timeout_s:g} s: {name} has read "
            f"{count.rows_consumed} rows in {count.steps} steps, and received "
            f"{count.rows_received}. Raise feed_timeout if a step may take longer; otherwise see "
            f"what it waits for{vain and f' ({vain})'}. Last log lines of {name}:{tail}"
        )


def _whole_epochs(left: Sequence[EpochLeft]) -> int:
    """Return how many epochs behind the first read the same rows: all of them."""
    part = next((i for i, each in enumerate(left) if each.done), len(left))
    return max(0, part - 1)


def _rows_had(brought: Mapping[int, int], cut: Cut, epochs: int) -> dict[int, int]:
    """Return the rows by node id of so many epochs; what a node that is gone had, feeders tell."""
    gone = {node_id: rows for node_id, rows in brought.items() if node_id != _REFUSED}
    return gone | {node_id: count.cut_rows * epochs for node_id, count in cut.items()}


def feed_targets(members: Iterable[Member]) -> tuple[Target, ...]:
    """Return where feeders find the nodes."""
    return tuple(
        Target(member.node.node_id, member.node.name, member.data_address) for member in members
    )
