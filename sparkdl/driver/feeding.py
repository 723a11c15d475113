"""One `feed` call: a Spark job per epoch in the caller's thread, watched from another.

Runs in: driver
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from sparkdl.control.messages import EpochEnd, FeedCount
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, FeedClosedError
from sparkdl.core.world import World
from sparkdl.driver import state as states
from sparkdl.driver.controller import Controller, View
from sparkdl.driver.executors.executor import Executor
from sparkdl.driver.outcome import feed_problem_of, generation_of, is_decided
from sparkdl.driver.progress import FeedBar
from sparkdl.driver.watch import FeedWatch, NewWorldError
from sparkdl.feed.order import FeedOrder, Target

_log = logging.getLogger(__name__)

_FETCH_S = 5.0
_BLAME_LINES = 10


@dataclass(frozen=True)
class FeedReport:
    """What became of the rows of one `feed` call.

    Attributes:
        epochs: epochs that were fed whole.
        rows: rows delivered, by node name.
        rows_unused: rows that no node wanted, or that a node received and did not read.
    """

    epochs: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    rows_unused: int = 0

    @property
    def rows_fed(self) -> int:
        """Rows delivered to all nodes."""
        return sum(self.rows.values())


@dataclass(frozen=True)
class FeedCall:
    """The arguments of one `feed` call, and where to turn.

    If a node loses its port while it is being fed, all nodes begin anew on new ports without the
    rows that they had, and so does the call.
    """

    controller: Controller
    executor: Executor
    world: World
    order: FeedOrder
    bar: FeedBar
    on_epoch: Callable[[int, int], None]

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
        order = replace(
            self.order,
            epoch=0,
            targets=feed_targets(state.world),
            generation=state.world.generation,
        )
        return replace(self, world=state.world, order=order)

    def _run(self, data: Any, epochs: int) -> FeedReport:
        rows = {member.node.node_id: 0 for member in self.world.fed}
        before = self.controller.look(lambda view: self.counts(view))
        refused = done = 0
        with self.bar, FeedWatch(self) as watch:
            for epoch in range(self.order.epoch, self.order.epoch + epochs):
                order = replace(self.order, epoch=epoch, run=uuid.uuid4().hex)
                of_epoch = dict.fromkeys(rows, 0)
                for partition in watch.guard(partial(self.executor.feed, data, order)):
                    refused += partition.rows_refused
                    for node_id, count in partition.rows.items():
                        of_epoch[node_id] += count
                if refused:
                    watch.wait_for_reason()  # which the nodes are about to tell
                if watch.has_closed:
                    break
                end = EpochEnd(order.feed, epoch, of_epoch)
                self.controller.broadcast(end, set(rows), order.generation)
                self.on_epoch(order.generation, epoch)
                rows = {node_id: rows[node_id] + of_epoch[node_id] for node_id in rows}
                done += 1
            watch.wait_read(self.order.epoch + done, before, rows)
        after = self.controller.look(lambda view: self.counts(view))
        return self._report(done, refused, before, after)

    def _report(
        self, epochs: int, refused: int, before: dict[int, FeedCount], after: dict[int, FeedCount]
    ) -> FeedReport:
        names = {m.node.node_id: m.node.name for m in self.world.fed}
        rows, unread = {}, 0
        for node_id, name in names.items():
            had, has = before[node_id], after[node_id]
            rows[name] = has.rows_received - had.rows_received
            unread += max(0, has.rows_received - has.rows_consumed)
        report = FeedReport(epochs, rows, refused + unread)
        if report.rows_unused:
            _log.warning(
                "Feed %r: %d rows were not used: map_fun ended or called terminate() before it had "
                "read them",
                self.order.feed,
                report.rows_unused,
            )
        return report

    def cancel(self) -> None:
        """End the call's Spark job soon."""
        self.executor.cancel_feeds(self.order.feed)

    def is_out_of_date(self, state: Any) -> bool:
        """Whether the nodes began anew, or are about to, since the call began."""
        return generation_of(state) not in (None, self.order.generation)

    def counts(self, view: View) -> dict[int, FeedCount]:
        """Return what each fed node has received and read, by node id."""
        nothing = FeedCount(self.order.feed, 0, 0, 0, False)
        return {
            member.node.node_id: view.feeds.get((member.node.node_id, self.order.feed), nothing)
            for member in self.world.fed
        }

    def closed_nodes(self, view: View) -> set[int]:
        """Return the nodes that take no more rows; none while what follows is undecided."""
        if not is_decided(view.state):
            return set()
        returned = getattr(view.state, "returned", {})
        closed = {node_id for node_id, count in self.counts(view).items() if count.closed}
        return closed | (set(returned) & {member.node.node_id for member in self.world.fed})

    def has_read(
        self, view: View, epochs: int, before: dict[int, FeedCount], rows: dict[int, int]
    ) -> bool:
        """Whether every node has read all that it was fed, or takes no more."""
        closed = self.closed_nodes(view)
        return all(
            node_id in closed
            or count.epochs_done >= epochs
            or count.rows_consumed - before[node_id].rows_consumed >= rows[node_id] > 0
            for node_id, count in self.counts(view).items()
        )

    def blame(self, timeout_s: float) -> str:
        """Describe which node stands still, with its last log lines."""
        counts = self.controller.look(lambda view: self.counts(view))
        behind = {
            n: c for n, c in counts.items() if c.rows_consumed < c.rows_received and not c.closed
        }
        node_id = min(behind or counts, key=lambda n: counts[n].rows_consumed)
        count, name = counts[node_id], self.world.member(node_id).node.name
        lines = self.controller.fetch_log(node_id, _BLAME_LINES, Deadline.after(_FETCH_S))
        tail = "".join(f"\n  | {line}" for line in lines) or " (nothing)"
        return (
            f"feed {self.order.feed!r} made no progress for {timeout_s:g} s: {name} has read "
            f"{count.rows_consumed} of {count.rows_received} rows. Raise feed_timeout if a step "
            f"may take longer; otherwise see what it waits for. Last log lines of {name}:{tail}"
        )


def feed_targets(world: World) -> tuple[Target, ...]:
    """Return the nodes that can be fed."""
    return tuple(
        Target(member.node.node_id, member.node.name, member.data_address) for member in world.fed
    )
