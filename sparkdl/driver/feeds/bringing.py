"""Brings a generation what the calls of a feed have left, in their order.

Runs in: driver
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, FeedClosedError
from sparkdl.core.world import Member, World
from sparkdl.driver.controller import Controller
from sparkdl.driver.executors.executor import Executor
from sparkdl.driver.feeds.books import Books
from sparkdl.driver.feeds.calls import Call
from sparkdl.driver.feeds.feeding import FeedCall, feed_targets
from sparkdl.driver.feeds.progress import FeedBar
from sparkdl.driver.feeds.report import FeedReport
from sparkdl.driver.feeds.streaming import IsOver
from sparkdl.driver.feeds.watch import NewWorldError
from sparkdl.driver.outcome import failure_of, feed_problem_of, is_decided
from sparkdl.driver.state import Finished, Running
from sparkdl.feed.order import FedPartition, FeedOrder

_log = logging.getLogger(__name__)


class Bringer:
    """Feeds one feed at a time in a thread; see `Feeds`, which sees to that.

    Args:
        order: returns what feeders of a feed are told, given a timeout and a role.
    """

    def __init__(
        self,
        controller: Controller,
        executor: Executor,
        books: Books,
        order: Callable[[str, float | None, str | None], FeedOrder],
    ) -> None:
        self._controller = controller
        self._executor = executor
        self._books = books
        self._order = order

    def bring(
        self,
        name: str,
        last: Call | None,
        show: bool | None,
        is_over: IsOver | None = None,
        brought: dict[int, Counter[str]] | None = None,
    ) -> FeedReport:
        """Feed what the generation is to have, up to call `last`, and begin anew with the next one.

        Args:
            is_over, brought: of a stream, whose micro-batch is `last`.

        Returns:
            What became of the rows of `last`.
        """
        told: FeedReport | None = None
        book = self._books.book(name)
        call: Call | None = None
        try:
            while world := self._next_world(is_awaited=last is not None):
                self.begin(name, world.generation)
                call = book.next(last)
                if call is None:
                    return told or _covered(last)
                _check_can_be_fed(name, call)
                left = call.left()
                order = replace(
                    self._order(name, call.asked.timeout_s, call.asked.to),
                    epoch=book.open_epochs(call, [each.epoch for each in left]),
                    partitions=call.shape.partitions,
                )
                rows = partial(call.rows_of, left)
                bar = FeedBar(name, len(left), show, rows, self._executor.hide_progress)
                feeding = self.call_in(world, order, call.asked.to, bar, call)
                if call is last and is_over is not None and brought is not None:
                    feeding = _of_stream(feeding, is_over, brought.get(world.generation, Counter()))
                try:
                    report, has_ended_early = feeding.run(call, left)
                except NewWorldError:
                    continue
                book.fed(call, has_ended_early)
                if call is last:
                    told = report
                    if brought is not None:
                        brought.setdefault(world.generation, Counter()).update(report.rows)
                else:
                    _tell_unused(name, 0 if has_ended_early else report.rows_unused)
            return FeedReport()
        except BaseException:
            for broken in (call, last):
                if broken is not None:
                    book.broke(broken)
            raise

    def begin(self, name: str, generation: int) -> None:
        """Begin a generation if it is new, and say what is lost to it."""
        _tell_lost(name, self._books.book(name).begin(generation))

    def call_in(
        self,
        world: World,
        order: FeedOrder,
        to: str | None,
        bar: FeedBar | None = None,
        call: Call | None = None,
    ) -> FeedCall:
        """Return what feeds the nodes of `world`: with `call`, rows of that."""
        members = fed_members(world, to)
        order = replace(order, targets=feed_targets(members), generation=world.generation)
        book = self._books.book(order.feed)

        def measured(fed: list[FedPartition]) -> None:
            if call is not None:
                rows = {each.partition: each.num_rows for each in fed if each.num_rows >= 0}
                book.measured(call, len(fed), rows)

        bar = bar or FeedBar(order.feed, 1, False)
        return FeedCall(self._controller, self._executor, members, order, bar, measured)

    def _next_world(self, is_awaited: bool) -> World | None:
        """Wait until it is known which nodes there are.

        Args:
            is_awaited: whether a call of the user's waits for the rows.

        Returns:
            `None` if the cluster was shut down, and nobody waits.

        Raises:
            SparkdlError: why they cannot be fed any more.
        """
        self._controller.wait_for(lambda view: is_decided(view.state), Deadline.after(None))
        state = self._controller.look(lambda view: view.state)
        if problem := feed_problem_of(state):
            if is_awaited or failure_of(state):
                raise problem
            return None
        assert isinstance(state, (Running, Finished))
        return state.world


def fed_members(world: World, to: str | None) -> tuple[Member, ...]:
    """Return the nodes that are fed: those of a role, or those that train.

    Raises:
        ConfigError: if there are none.
    """
    members = world.fed
    if to is not None:
        members = tuple(m for m in world.members if m.role.name == to and m.data_address)
    if not members:
        roles = sorted({m.role.name for m in world.members if m.data_address})
        raise ConfigError(f"to={to!r}: no such node can be fed; choose one of {roles}")
    return members


def _of_stream(feeding: FeedCall, is_over: IsOver, rows: Counter[str]) -> FeedCall:
    """Return the feeding of a micro-batch, given the rows by node name that came before."""
    brought = {member.node.node_id: rows[member.node.name] for member in feeding.members}
    least = min(brought.values())
    ahead = {node_id: count - least for node_id, count in brought.items()}
    order = replace(feeding.order, ahead=ahead)
    return replace(feeding, order=order, is_over=is_over, brought=brought)


def _check_can_be_fed(name: str, call: Call) -> None:
    """Note that a call is being fed, once at most if its data can be read once.

    Raises:
        FeedClosedError: if it was, and there are rows that no checkpoint covers.
    """
    if call.has_begun and isinstance(call.asked.data, Iterator):
        kind = type(call.asked.data).__name__
        raise FeedClosedError(
            f"feed {name!r}: the nodes begin anew, and a {kind}, whose rows no checkpoint covers "
            "as a whole, cannot be fed again; give a list, a table, or a DataFrame"
        )
    call.has_begun = True


def _tell_unused(name: str, rows: int) -> None:
    if rows:
        _log.warning(
            "Feed %r: %d rows of an earlier call, which were fed again after a restart, have not "
            "been used yet; they come first in the next epoch, if there is one",
            name,
            rows,
        )


def _covered(call: Call | None) -> FeedReport:
    """Return the report of a call of which a checkpoint covers all rows, perhaps since a moment."""
    if call is None:
        return FeedReport()
    covered = call.rows_covered
    return FeedReport(call.asked.epochs, rows_used=covered, rows_covered=covered)


def _tell_lost(name: str, calls: list[Call]) -> None:
    rows = sum(max(0, sum(call.shape.rows.values()) - call.rows_covered) for call in calls)
    if rows:
        _log.warning(
            "Feed %r: the nodes begin anew at their last checkpoint. Since then they have had %d "
            "rows in %d micro-batches of a stream, which are lost to the model: Spark does not "
            "bring them again. Make checkpoints more often where that matters",
            name,
            rows,
            len(calls),
        )
