"""Questions to agents, and who waits for their answers.

Runs in: driver
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from sparkdl.control.messages import ToAgent
from sparkdl.driver.changed import Changed

Question = Callable[[int], ToAgent]
"""Makes the message, given the number that its answer brings back."""


@dataclass
class PendingRequest:
    """One question to several nodes.

    Attributes:
        awaited: the nodes, by id, that have not answered yet.
        answers: by node id.
        numbers: of the messages on their way.
    """

    question: Question
    awaited: set[int]
    answers: dict[int, Any] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)


class PendingRequests:
    """Used on the controller's loop alone.

    Args:
        send: takes an agent's id and a message.
        changed: held while an inquiry changes.
    """

    def __init__(self, send: Callable[[str, ToAgent], None], changed: Changed) -> None:
        self._send = send
        self._changed = changed
        self._waiting: dict[int, tuple[PendingRequest, int]] = {}
        self._numbers = count()

    def ask(self, inquiry: PendingRequest, agents: Mapping[int, str]) -> None:
        """Send the question to the agents of the nodes; nobody waits for one without an agent."""
        for node_id in sorted(inquiry.awaited & agents.keys()):
            number = next(self._numbers)
            inquiry.numbers.append(number)
            self._waiting[number] = inquiry, node_id
            self._send(agents[node_id], inquiry.question(number))
        with self._changed:
            inquiry.awaited &= agents.keys()
            self._changed.notify_all()

    def answer(self, number: int, value: Any) -> None:
        """Note an answer; one that nobody waits for any more is dropped."""
        if number not in self._waiting:
            return
        inquiry, node_id = self._waiting.pop(number)
        with self._changed:
            inquiry.answers[node_id] = value
            inquiry.awaited.discard(node_id)
            self._changed.notify_all()

    def forget(self, inquiry: PendingRequest) -> None:
        """Wait for no more answers."""
        for number in inquiry.numbers:
            self._waiting.pop(number, None)
