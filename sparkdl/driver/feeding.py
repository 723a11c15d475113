"""One `feed` call: a Spark job per pass in the caller's thread, watched from another.

Runs in: driver
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from sparkdl.control.messages import FeedBegin, FeedCount, Granted, ToAgent
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, FeedClosedError
from sparkdl.core.world import Member
from sparkdl.driver import state as states
from sparkdl.driver.controller import Controller, View
from sparkdl.driver.epoch_ends import EpochEnds
from sparkdl.driver.executors.executor import Executor
from sparkdl.driver.outcome import away_of, feed_problem_of, generation_of, is_decided
from sparkdl.driver.progress import FeedBar
from sparkdl.driver.reading import read_at_nodes
from sparkdl.driver.report import Fed, FeedReport, report
from sparkdl.driver.watch import FeedWatch, NewWorldError
from sparkdl.feed.order import FedPartition, FeedOrder, Target
from sparkdl.feed.parquet import ParquetSource

_FETCH_S = 5.0
_BLAME_LINES = 10


@dataclass(frozen=True)
class FeedCall:
    """The arguments of one `feed` call, and where to turn.

    If a node loses its port while it is being fed, all nodes begin anew on new ports without the
    rows that they had, and so does the call.

    Attributes:
        members: the nodes that are fed.
        reserve: told which epochs (of which generation) are taken, before they are fed.
        is_over: of a stream, whose micro-batch this call feeds: whether it is over.
        brought: rows by node id that the stream has brought before.
    """

    controller: Controller
    executor: Executor
    members: tuple[Member, ...]
    order: FeedOrder
    bar: FeedBar
    reserve: Callable[[int, int], None]
    is_over: Callable[[View], bool] | None = None
    brought: Mapping[int, int] = field(default_factory=dict)

    @property
    def goes_on(self) -> bool:
        """Whether the nodes read what this call feeds, and what the next one does, as one."""
        return self.is_over is not None

    def run(self, data: Any, epochs: int) -> FeedReport:
        """Feed `data` that many times; returns when the nodes have read it, or want no more.

        Raises:
            NodeFailedError: if a node failed.
            FeedTimeoutError: if no row was received or read for the feed timeout.
            SparkdlError: if feeding failed otherwise.
        """
        if epochs > 1 and isinstance(data, Iterator):
            raise ConfigError(
                f"a {type(data).__name__} can be read once, and epochs={epochs}; give a list"
            )
        call = self
        while True:
            try:
                return call._run(data, epochs)
            except NewWorldError:
                if isinstance(data, Iterator):
                    raise FeedClosedError(
                        f"a node lost its port, and a {type(data).__name__} cannot be fed again"
                    ) from None
                call = call._in_new_world()

    def _in_new_world(self) -> FeedCall:
        """Return this call anew, once the next world has begun or there is not to be one."""
        self.controller.wait_for(lambda view: is_decided(view.state), Deadline.after(None))
        state = self.controller.look(lambda view: view.state)
        problem = feed_problem_of(state)
        if problem is not None:
            raise problem
        assert isinstance(state, (states.Running, states.Finished))
        ids = {member.node.node_id for member in self.members}
        members = tuple(m for m in state.world.members if m.node.node_id in ids)
        order = replace(
            self.order,
            epoch=0,
            targets=feed_targets(members),
            generation=state.world.generation,
        )
        return replace(self, members=members, order=order)

    def _run(self, data: Any, epochs: int) -> FeedReport:
        feed, first = self.order.feed, self.order.epoch
        last = first + epochs - 1
        self.reserve(self.order.generation, last + 1)
        before = self.controller.look(self.counts)
        # The epoch behind those of a stream's call ends the stream: see `StreamFeed.end`.
        self.broadcast(FeedBegin(feed, first, last + self.goes_on))
        expected = dict.fromkeys(before, 0)
        epoch, refused, passes = first, 0, 0
        ends = EpochEnds(self)
        with self.bar, FeedWatch(self) as watch:
            try:
                while epoch <= last and not watch.has_closed:
                    order = replace(
                        self.order,
                        epoch=epoch,
                        last_epoch=last,
                        keep=epoch < last,
                        run=uuid.uuid4().hex,
                    )
                    refused += self._deliver(data, order, watch)
                    if watch.has_closed:
                        break
                    passes += 1
                    cut = ends.cut(epoch, watch.has_reason)
                    watch.raise_reason()
                    stop = last if all(c.cut_whole for c in cut.values()) else epoch
                    ends.end(epoch, stop, cut)
                    for node_id, count in cut.items():
                        expected[node_id] += count.cut_rows * (stop + 1 - epoch)
                    epoch = stop + 1
                watch.wait_read(lambda view: self._has_read(view, last, before, expected))
            except NewWorldError:
                raise
            except BaseException:
                ends.end_early(epoch, last)
                raise
            if watch.has_closed:
                ends.end_early(epoch, last)
        names = {m.node.node_id: m.node.name for m in self.members}
        delivered = {} if watch.has_closed else expected
        goes_on = self.goes_on and not watch.has_closed
        fed = Fed(feed, min(epoch, last + 1) - first, passes, refused, delivered, goes_on)
        return report(fed, names, before, self.controller.look(self.counts))

    def _deliver(self, data: Any, order: FeedOrder, watch: FeedWatch) -> int:
        """Bring the rows of one epoch to the nodes; return how many of them no node wanted."""
        if isinstance(data, ParquetSource):
            return read_at_nodes(self, data, order, watch)
        fed: list[FedPartition] = watch.guard(partial(self.executor.feed, data, order))
        refused = sum(partition.rows_refused for partition in fed)
        if refused:
            watch.wait_for_reason()  # which the nodes are about to tell
        return refused

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
        tail = "".join(f"\n  | {line}" for line in lines) or " (nothing)"
        return (
            f"feed {self.order.feed!r} made no progress for {timeout_s:g} s: {name} has read "
            f"{count.rows_consumed} rows in {count.steps} steps, and received "
            f"{count.rows_received}. Raise feed_timeout if a step may take longer; otherwise see "
            f"what it waits for. Last log lines of {name}:{tail}"
        )


def feed_targets(members: Iterable[Member]) -> tuple[Target, ...]:
    """Return where feeders find the nodes."""
    return tuple(
        Target(member.node.node_id, member.node.name, member.data_address) for member in members
    )
