"""Questions to agents, and who waits for their answers.

Runs in: driver
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import Any

from sparkdl.control.messages import ToAgent

Question = Callable[[int], ToAgent]
"""Makes the message, given the number that its answer brings back."""


class Inquiries:
    """Used on the controller's loop alone.

    Args:
        send: takes an agent's id and a message.
    """

    def __init__(self, send: Callable[[str, ToAgent], None]) -> None:
        self._send = send
        self._waiting: dict[int, Future[Any]] = {}
        self._numbers = count()

    def ask(self, agent_id: str, question: Question, answer: Future[Any]) -> None:
        """Send a question; `answer` gets what comes, unless it is cancelled before."""
        number = next(self._numbers)
        self._waiting[number] = answer
        answer.add_done_callback(lambda _: self._waiting.pop(number, None))
        self._send(agent_id, question(number))

    def answer(self, number: int, value: Any) -> None:
        """Hand on an answer; one that nobody waits for any more is dropped."""
        waiting = self._waiting.pop(number, None)
        if waiting is not None and waiting.set_running_or_notify_cancel():
            waiting.set_result(value)
