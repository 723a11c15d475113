"""One `feed` call: a Spark job per epoch in the caller's thread, watched from another.

Runs in: driver
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from sparkdl.control.messages import EpochEnd, FeedCount
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import FeedClosedError, FeedTimeoutError, SparkdlError, node_error
from sparkdl.core.world import World
from sparkdl.driver import state as states
from sparkdl.driver.controller import Controller, View
from sparkdl.driver.executors.executor import Executor
from sparkdl.driver.progress import FeedBar
from sparkdl.feed.feeder import FeedOrder, Target

_log = logging.getLogger(__name__)

_SETTLE_S = 5.0
"""How long to wait for a node's failure that may explain a failed Spark job."""
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
    """The arguments of one `feed` call, and where to turn."""

    controller: Controller
    executor: Executor
    world: World
    order: FeedOrder
    bar: FeedBar
    on_epoch: Callable[[int], None]

    def run(self, data: Any, epochs: int) -> FeedReport:
        """Feed `data` that many times; returns when the nodes have read it, or want no more.

        Raises:
            NodeFailedError: if a node failed.
            FeedTimeoutError: if no row was received or read for the feed timeout.
            SparkdlError: if feeding failed otherwise.
        """
        rows = {member.node.node_id: 0 for member in self.world.fed}
        before = self.controller.look(lambda view: self.counts(view))
        refused = done = 0
        with self.bar, _Watch(self) as watch:
            for epoch in range(self.order.epoch, self.order.epoch + epochs):
                order = replace(self.order, epoch=epoch, run=uuid.uuid4().hex)
                of_epoch = dict.fromkeys(rows, 0)
                for partition in watch.guard(lambda order=order: self.executor.feed(data, order)):
                    refused += partition.rows_refused
                    for node_id, count in partition.rows.items():
                        of_epoch[node_id] += count
                if watch.has_closed:
                    break
                self.controller.broadcast(EpochEnd(order.feed, epoch, of_epoch), set(rows))
                self.on_epoch(epoch)
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

    def counts(self, view: View) -> dict[int, FeedCount]:
        nothing = FeedCount(self.order.feed, 0, 0, 0, False)
        return {
            member.node.node_id: view.feeds.get((member.node.node_id, self.order.feed), nothing)
            for member in self.world.fed
        }

    def closed_nodes(self, view: View) -> set[int]:
        """Return the nodes that take no more rows."""
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
        lines = self.controller.fetch_log(node_id, _BLAME_LINES, Deadline.after(_SETTLE_S))
        tail = "".join(f"\n  | {line}" for line in lines) or " (nothing)"
        return (
            f"feed {self.order.feed!r} made no progress for {timeout_s:g} s: {name} has read "
            f"{count.rows_consumed} of {count.rows_received} rows. Raise feed_timeout if a step may "
            f"take longer; otherwise see what it waits for. Last log lines of {name}:{tail}"
        )


class _Watch:
    """Ends the Spark job when it makes no sense any more, and knows why."""

    def __init__(self, call: FeedCall) -> None:
        self._call = call
        self._timeout_s = call.order.timeout_s
        self._is_over = False
        self._problem: SparkdlError | None = None
        self.has_closed = False
        self._thread = threading.Thread(target=self._run, name="sparkdl-feed-watch", daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        controller = self._call.controller
        with controller.changed:
            self._is_over = True
            controller.changed.notify_all()
        if kind is not None:
            self._call.executor.cancel_feeds()
        self._thread.join(_SETTLE_S)

    def guard(self, job: Callable[[], Any]) -> Any:
        """Run a Spark job; if it fails because of a node, raise what the node said."""
        try:
            fed = job()
        except Exception:
            self._wait_for_reason()
            if self._problem is None and self.has_closed:
                return []  # nobody wants more rows, and so the job was cancelled
            if self._problem is not None:
                raise self._problem from None
            raise
        if self._problem is not None:
            raise self._problem
        return fed

    def wait_read(self, epochs: int, before: dict[int, FeedCount], rows: dict[int, int]) -> None:
        """Wait until the nodes have read everything; the watching thread ends the wait early."""
        call = self._call
        call.controller.wait_for(
            lambda view: self._problem is not None or call.has_read(view, epochs, before, rows),
            Deadline.after(None),
        )
        if self._problem:
            raise self._problem

    def _wait_for_reason(self) -> None:
        """A job has failed: give the failure of a node that may be behind it time to be known."""
        self._call.controller.wait_for(
            lambda view: self._problem is not None or self.has_closed, Deadline.after(_SETTLE_S)
        )

    def _run(self) -> None:
        controller = self._call.controller
        progress = -1
        deadline = Deadline.after(self._timeout_s)
        while True:
            with controller.changed:
                view = controller.view
                if view.progress != progress:
                    progress, deadline = view.progress, Deadline.after(self._timeout_s)
                self._problem = self._problem or _failure(view.state)
                closed = len(self._call.closed_nodes(view)) == len(self._call.world.fed)
                has_to_stop = self._problem is not None or (closed and not self.has_closed)
                self.has_closed = self.has_closed or closed
                if has_to_stop:
                    controller.changed.notify_all()
                if self._is_over or (has_to_stop and self._problem):
                    break
                if not has_to_stop:
                    controller.changed.wait(min(1.0, deadline.remaining_s))
            self._call.bar.update(self._rows_read())
            if has_to_stop:
                self._call.executor.cancel_feeds()
            elif deadline.has_passed and not self._is_over:
                self._time_out()
                return
        if self._problem:
            self._call.executor.cancel_feeds()

    def _rows_read(self) -> int:
        counts = self._call.controller.look(lambda view: self._call.counts(view))
        return sum(count.rows_consumed for count in counts.values())

    def _time_out(self) -> None:
        problem = FeedTimeoutError(self._call.blame(self._timeout_s))
        controller = self._call.controller
        with controller.changed:
            self._problem = problem
            controller.changed.notify_all()
        self._call.executor.cancel_feeds()


def _failure(state: states.State) -> SparkdlError | None:
    if isinstance(state, states.Failed):
        return node_error(state.failures) if state.failures else state.problem
    if isinstance(state, (states.Stopping, states.Stopped)):
        return FeedClosedError("the cluster was shut down while it was being fed")
    return None


def feed_targets(world: World) -> tuple[Target, ...]:
    """Return the nodes that can be fed."""
    return tuple(
        Target(member.node.node_id, member.node.name, member.data_address) for member in world.fed
    )
