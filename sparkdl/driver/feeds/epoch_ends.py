"""How the epochs of a `feed` call end: all nodes have to agree on which are there, and how long.

Runs in: driver
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import structs

from sparkdl.control.messages import EpochEnd, FeedCount, FeedCut, FeedHold
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import FeedTimeoutError
from sparkdl.driver.outcome import feed_problem_of

if TYPE_CHECKING:
    from sparkdl.driver.controller import View
    from sparkdl.driver.feeds.feeding import FeedCall

_ANSWER_S = 30.0
"""How long the nodes may take to say what they have of an epoch, or which one they read."""

Cut = dict[int, FeedCount]
"""What each node has of an epoch of which it takes no more, by node id."""


class EpochEnds:
    """Ends the epochs of one call."""

    def __init__(self, call: FeedCall) -> None:
        self._call = call
        self._feed = call.order.feed
        self._repeated: tuple[int, Cut] | None = None
        """The epoch that is read from the logs more than once, and what the nodes have of it."""

    def held(self, epoch: int, is_pointless: Callable[[], bool]) -> dict[int, int]:
        """Wait until the nodes have begun `epoch`; return the rows of it that they still had."""
        counts = self._answers(lambda count: count.began >= epoch, is_pointless)
        return {node_id: count.epoch_rows for node_id, count in counts.items()}

    def cut(self, epoch: int, is_pointless: Callable[[], bool]) -> Cut:
        """Have the nodes take no more rows of `epoch`; return what those that go on have of it."""
        counts = self._counted(epoch, is_pointless)
        silent = [node_id for node_id, count in counts.items() if count.cut < epoch]
        if silent and not is_pointless():
            names = ", ".join(m.node.name for m in self._call.members if m.node.node_id in silent)
            raise FeedTimeoutError(
                f"the agent of {names} did not say within {_ANSWER_S:g} s how many rows of feed "
                f"{self._feed!r} it has; its host may be overloaded, or the network cut"
            )
        return counts

    def end(self, epoch: int, last: int, cut: Cut, is_rest: bool = False) -> bool:
        """Tell the nodes how long `epoch` is, and that those up to `last` read the same again.

        Args:
            is_rest: a checkpoint covers the other rows of `epoch`. If fewer than there are nodes
                are left, they come first in the next epoch, as in a stream: a step needs one each.

        Returns:
            Whether they do: then no node is sure to read them before there is a next epoch.
        """
        self._repeated = (epoch, cut) if last > epoch else None
        goes_on = is_rest and not all(count.cut_rows for count in cut.values())
        for each in range(epoch, last + 1):
            self._mark(each, cut, again=each < last, goes_on=goes_on)
        return goes_on

    def end_early(self, epoch: int, last: int) -> None:
        """End the call as it is.

        What the nodes have of an epoch that is being fed is an epoch, of as many steps for each. If
        all have been fed, and are read from the logs, the one that any node is reading is the last.

        Args:
            epoch: the one that is being fed; beyond `last` if all have been.
        """
        if self._call.controller.look(lambda view: feed_problem_of(view.state) is not None):
            return
        if epoch <= last:
            cut = self._counted(epoch)
            # Where a node has no row yet, none has taken a step, and none is to.
            if not all(count.cut_rows for count in cut.values()):
                cut = {n: structs.replace(count, cut_rows=0) for n, count in cut.items()}
            self._mark(epoch, cut)
        elif self._repeated is not None:
            first, cut = self._repeated
            self._call.broadcast(FeedHold(self._feed, last))
            told = self._answers(lambda count: count.held == last or count.closed_to >= last)
            reading = [c.reading for c in told.values() if c.held == last and c.closed_to < last]
            self._mark(min(last, max([first, *reading])), cut)

    def _mark(self, epoch: int, cut: Cut, again: bool = False, goes_on: bool = False) -> None:
        rows = {node_id: count.cut_rows for node_id, count in cut.items()}
        goes_on = goes_on or self._call.goes_on
        self._call.broadcast(EpochEnd(self._feed, epoch, rows, again, goes_on))

    def _counted(self, epoch: int, is_pointless: Callable[[], bool] = lambda: False) -> Cut:
        self._call.broadcast(FeedCut(self._feed, epoch))
        return self._answers(lambda count: count.cut >= epoch, is_pointless)

    def _answers(
        self, is_one: Callable[[FeedCount], bool], is_pointless: Callable[[], bool] = lambda: False
    ) -> Cut:
        """Wait for the answer of each node that goes on; return what they have told by then."""

        def told(view: View) -> Cut:
            gone = self._call.gone_nodes(view)
            return {n: count for n, count in self._call.counts(view).items() if n not in gone}

        self._call.controller.wait_for(
            lambda view: (
                is_pointless()
                or feed_problem_of(view.state) is not None
                or all(map(is_one, told(view).values()))
            ),
            Deadline.after(_ANSWER_S),
        )
        return self._call.controller.look(told)
