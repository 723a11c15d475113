"""Ends a feed's job when it makes no sense any more, and knows why.

Runs in: driver
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sparkdl.control.messages import Granted
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, FeedTimeoutError, FeedTypeError, SparkdlError
from sparkdl.driver.outcome import feed_problem_of
from sparkdl.driver.threads import begin
from sparkdl.feed.feeder import MAX_COUNT_S
from sparkdl.feed.order import FeederError

if TYPE_CHECKING:
    from sparkdl.driver.controller import View
    from sparkdl.driver.feeds.feeding import FeedCall

_SETTLE_S = 5.0
"""How long to wait for a node's failure that may explain a failed Spark job."""


class NewWorldError(Exception):
    """The nodes begin anew, and so has the feed."""


class FeedWatch:
    """Ends the Spark job when it makes no sense any more, and knows why."""

    def __init__(self, call: FeedCall) -> None:
        self._call = call
        self._timeout_s = call.order.timeout_s
        self._is_over = False
        self._problem: SparkdlError | None = None
        self.has_closed = False
        self._counts_until = Deadline.after(0.0)
        self.is_cut = False
        """The job was cancelled, for nobody wants more rows: some were not counted."""
        self._is_renewed = False
        self._granted: Granted | None = None
        self._thread = threading.Thread(target=self._run, name="sparkdl-feed-watch", daemon=True)

    def __enter__(self) -> FeedWatch:
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
            self._call.cancel()
        self._thread.join(_SETTLE_S)

    @property
    def is_counting(self) -> bool:
        """Whether the job goes on, though nobody wants more rows, to count those that are left."""
        return self.has_closed and not self._counts_until.has_passed

    def guard(self, job: Callable[[], Any]) -> Any:
        """Run a Spark job; if it fails because of a node, raise what the node said.

        It runs in a thread of its own, with this one's local properties: an interrupt that comes
        within py4j closes the connections of all threads, and the nodes' job would be sent again.
        """
        try:
            name = f"sparkdl-job-{self._call.order.feed}"
            fed = begin(job, name, self._call.executor.thread).result()
        except (ConfigError, FeedTypeError):  # no node has to do with it
            raise
        except Exception as error:
            settings = self._call.controller.spec.settings
            # A node that cannot be reached is known to be lost after its lease at the latest.
            is_cut_off = settings.max_restarts and FeederError.__name__ in f"{error!r} {error}"
            self.wait_for_reason(settings.lease_s + _SETTLE_S if is_cut_off else _SETTLE_S)
            if self.has_closed:
                return []  # nobody wants more rows, and so the job was cancelled
            raise
        self.raise_reason()
        return fed

    def wait_read(self, has_read: Callable[[View], bool]) -> None:
        """Wait until the nodes have read everything; the watching thread ends the wait early."""
        self._call.controller.wait_for(
            lambda view: self.has_reason() or self.has_closed or has_read(view),
            Deadline.after(None),
        )
        self.raise_reason()

    def has_reason(self) -> bool:
        """Whether the call cannot go on; raised by `raise_reason`."""
        return self._problem is not None or self._is_renewed

    def raise_reason(self) -> None:
        """Raise why the call cannot go on, if it cannot."""
        if self._problem is not None:
            raise self._problem from None
        if self._is_renewed:
            raise NewWorldError

    def wait_for_reason(self, timeout_s: float = _SETTLE_S) -> None:
        """Give what is behind a failed job, or refused rows, time to be known; raise a failure."""
        self._call.controller.wait_for(
            lambda view: self.has_reason() or self.has_closed, Deadline.after(timeout_s)
        )
        self.raise_reason()

    def _run(self) -> None:
        controller = self._call.controller
        progress = -1
        deadline = Deadline.after(self._timeout_s)
        while True:
            with controller.changed:
                view = controller.view
                if view.progress != progress:
                    progress, deadline = view.progress, Deadline.after(self._timeout_s)
                self._problem = self._problem or feed_problem_of(view.state)
                self._is_renewed = self._problem is None and self._call.is_out_of_date(view.state)
                self._note_unwanted(view)
                granted = self._call.granted(view)
                is_unwanted = self.has_closed and not self.is_counting
                has_to_stop = self.has_reason() or (is_unwanted and not self.is_cut)
                self.is_cut = self.is_cut or is_unwanted
                if self.has_reason():
                    controller.changed.notify_all()
                if self._is_over or self.has_reason():
                    break
                if not has_to_stop:
                    counting_s = self._counts_until.remaining_s if self.is_counting else 1.0
                    controller.changed.wait(min(1.0, deadline.remaining_s, counting_s))
            if granted is not None and granted != self._granted:
                self._granted = granted
                self._call.broadcast(granted)
            self._call.bar.update(self._rows_read())
            if has_to_stop:
                self._call.cancel()
            elif deadline.has_passed and not self._is_over:
                self._time_out()
                return
        if self.has_reason():
            self._call.cancel()

    def _note_unwanted(self, view: View) -> None:
        if not self.has_closed and self._call.is_unwanted(view):
            limit_s = MAX_COUNT_S if self._call.is_left(view) else 0.0
            self.has_closed, self._counts_until = True, Deadline.after(limit_s)
            self._call.controller.changed.notify_all()

    def _rows_read(self) -> int:
        counts = self._call.controller.look(lambda view: self._call.counts(view))
        return sum(count.rows_consumed for count in counts.values())

    def _time_out(self) -> None:
        problem = FeedTimeoutError(self._call.blame(self._timeout_s))
        controller = self._call.controller
        with controller.changed:
            self._problem = problem
            controller.changed.notify_all()
        self._call.cancel()
