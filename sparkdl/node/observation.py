"""Reports to the driver on a node's child beside its rows: prints, steps, load, stacks.

Runs in: agent
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sparkdl.control.channel import Imported, Local
from sparkdl.control.messages import (
    FetchLog,
    FetchStacks,
    FromAgent,
    LastLines,
    LogLines,
    LogTail,
    Stacks,
)
from sparkdl.core.throttle import Throttle
from sparkdl.node.activity import Activity, log_period_s
from sparkdl.node.children import NodeChild
from sparkdl.node.error_lines import marked_in, unmarked
from sparkdl.node.load import LoadWatch
from sparkdl.node.spec import AgentSpec

_LOG_PERIOD_S = 0.25
"""A child's output goes to the driver this often at most."""


class Observation:
    """All that is seen of a node's child beside its feeds. Runs on the agent's loop.

    Args:
        report: sends to the driver.
        feed_nbytes: returns how many bytes of rows wait, and how many may.
    """

    def __init__(
        self,
        agent_spec: AgentSpec,
        child: NodeChild,
        report: Callable[[FromAgent], None],
        feed_nbytes: Callable[[], tuple[int, int]],
    ) -> None:
        spec, loop = agent_spec.spec, asyncio.get_running_loop()
        log_s = log_period_s(spec.settings.recovery.hang_timeout_s)
        self._spec, self._child, self._report = spec, child, report
        self._activity = Activity(loop, report, log_s)
        self._lines = Throttle(loop, self._stream_log, _LOG_PERIOD_S)
        self._load = LoadWatch(loop, report, child.gpus, feed_nbytes)

    def begin(self) -> None:
        """Watch the child that has been started last."""
        log = self._child.process.log
        self._activity.begin(self._child.generation, log)
        log.watch(asyncio.get_running_loop(), self._on_print)
        self._on_print()  # report the lines printed so far

    def note(self, message: Local) -> None:
        """Take a message of the child."""
        if isinstance(message, Imported) and self._spec.is_watched:
            self._load.begin(self._child.process.pid)
        else:
            self._activity.note(message)

    def answer(self, question: FetchLog | FetchStacks) -> None:
        """Answer the driver's question."""
        process = self._child.process
        match question:
            case FetchLog(request, lines):
                tail = process.log.tail(lines)
                self._report(LogTail(request, tail))
            case FetchStacks(request):
                loop = asyncio.get_running_loop()
                process.stacks.ask(loop, process.pid, lambda it: self._report(Stacks(request, it)))

    def end(self) -> None:
        """Report the last of a child that has ended."""
        # All of them now: the next child of this node has a log of its own.
        while self._streams_log and self._report_lines(is_last=True):
            pass
        last = self._child.process.log.tail()
        self._report(LastLines(self._child.generation, last))

    def close(self) -> None:
        """Report nothing more."""
        self._activity.close()
        self._lines.cancel()
        self._load.close()

    @property
    def _streams_log(self) -> bool:
        """Whether the driver prints or keeps the lines of this node as they come."""
        return self._spec.keeps_log or self._spec.is_printed(self._child.rank)

    def _on_print(self) -> None:
        self._activity.printed()
        if self._streams_log:
            self._lines.request()

    def _stream_log(self) -> None:
        if self._report_lines():  # after a burst the others follow
            self._lines.request()

    def _report_lines(self, is_last: bool = False) -> bool:
        """Send new lines; return whether there were any."""
        if lines := self._child.process.log.new_lines(is_last):
            is_shown = self._spec.is_printed(self._child.rank)
            self._report(LogLines(tuple(map(unmarked, lines)), is_shown, marked_in(lines)))
        return bool(lines)
