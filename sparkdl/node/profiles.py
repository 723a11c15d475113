"""The profiles that a node's child is asked for: passed on, and answered in any case.

Runs in: agent
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from sparkdl.control.channel import TakeProfile
from sparkdl.control.messages import FetchProfile, Profiled
from sparkdl.node.supervisor import why_silent

_ANSWER_S = 3.0
_WRITE_S = 60.0
"""The time a framework's profiler may take to write its result."""


def answer_s(tool: str) -> float:
    """Return how long a child may take beyond the profile itself."""
    return _WRITE_S if tool else _ANSWER_S


class Profiles:
    """The running profiles of one node. Runs on the agent's loop.

    Args:
        report: takes the answers.
        node: its name.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, report: Callable[[Profiled], None], node: str
    ) -> None:
        self._loop = loop
        self._report = report
        self._node = node
        self._awaited: dict[int, asyncio.TimerHandle] = {}

    def take(
        self, asked: FetchProfile, pid: int | None, send: Callable[[TakeProfile], None]
    ) -> None:
        """Ask the child for a profile; answer in its place if it stands still.

        Args:
            pid: of the child; `None` if there is none.
            send: sends to it.
        """
        if pid is None:
            self._report(Profiled(asked.request, problem="there is no child"))
            return
        folder = f"{asked.folder}/{self._node.replace(':', '-')}" if asked.folder else ""
        # The loop's clock is the monotonic one, which all processes of a host share.
        until_s = self._loop.time() + asked.seconds
        limit_s = asked.seconds + answer_s(asked.tool)
        give_up = partial(self._give_up, asked.request, pid, limit_s)
        self._awaited[asked.request] = self._loop.call_later(limit_s, give_up)
        send(TakeProfile(asked.request, until_s, asked.tool, folder))

    def child_ended(self) -> None:
        """Answer for the child."""
        for request in list(self._awaited):
            self.answer(Profiled(request, problem="the child has ended meanwhile"))

    def close(self) -> None:
        """Answer nothing more."""
        for timer in self._awaited.values():
            timer.cancel()
        self._awaited.clear()

    def _give_up(self, request: int, pid: int, limit_s: float) -> None:
        otherwise = "its interpreter does not answer: C code holds its lock; see cluster.stacks()"
        problem = why_silent(pid, f"no profile within {limit_s:g} s", otherwise)
        self.answer(Profiled(request, problem=problem))

    def answer(self, message: Profiled) -> None:
        """Pass on an answer, the child's or one that is given for it."""
        timer = self._awaited.pop(message.request, None)
        # Otherwise this request has an answer: the child's own came too late.
        if timer is not None:
            timer.cancel()
            self._report(message)
