"""The driver's questions to the nodes: their last lines and stacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

from sparkdl.control.messages import FetchLog, FetchStacks, ToAgent
from sparkdl.core.deadline import Deadline
from sparkdl.core.spec import NodeSpec
from sparkdl.driver.lifecycle.state import agents_of, before_stop, generation_of, is_empty
from sparkdl.driver.threads import Changed
from sparkdl.driver.view import View

Lines = tuple[str, ...]
Question = Callable[[int], ToAgent]
"""Makes the message from the number that its answers will carry."""


class Questions:
    """Asked from any thread; the answers come on the controller's loop.

    Args:
        nodes: of the cluster.
        changed: held while the `view` changes, and while answers come.
        soon: has a function called on the loop; false once that is closed.
        send: takes an agent's id and a message, there.
        written: returns a node's last lines from its log file; used when its agent is lost.
    """

    def __init__(
        self,
        nodes: Sequence[NodeSpec],
        view: View,
        changed: Changed,
        soon: Callable[..., bool],
        send: Callable[[str, ToAgent], None],
        written: Callable[[str, int], tuple[str, ...]],
    ) -> None:
        self._nodes, self._view, self._changed = nodes, view, changed
        self._soon, self._send, self._written = soon, send, written
        self._numbers = count()
        self._answers: dict[int, dict[str, Any]] = {}
        """By the question's number and the agent."""
        self._last: dict[int, tuple[int, Lines]] = {}
        """Generation and last lines of the child that ended last, by node id."""

    def fetch_log(self, node_id: int, lines: int, deadline: Deadline) -> Lines:
        """Return the last lines of a node's child; the stored ones if the node is gone."""
        answer = self._ask([node_id], lambda number: FetchLog(number, lines), deadline).get(node_id)
        if answer is not None:
            return tuple(answer[-lines:]) if lines > 0 else ()
        with self._changed:
            generation, kept = self._last.get(node_id, (-1, ()))
            now = generation_of(before_stop(self._view.state)) or 0
        if generation < now:
            # The agent is lost with its unsent lines. The file has those of all the node's
            # children.
            names = [node.name for node in self._nodes if node.node_id == node_id]
            kept = (self._written(names[0], lines) if names else ()) or kept
        return kept[-lines:] if lines > 0 else ()

    def fetch_stacks(self, deadline: Deadline) -> dict[str, str]:
        """Return by node name the stacks of its child, or why they are unknown."""
        answers = self._ask([node.node_id for node in self._nodes], FetchStacks, deadline)
        silent = "its agent did not answer: it is lost or stopped, or cannot be reached"
        with self._changed:
            if is_empty(self._view.state):
                silent = "it has ended, as the cluster has"
        return {node.name: answers.get(node.node_id, silent) for node in self._nodes}

    def answer(self, agent_id: str, number: int, value: Any) -> None:
        """Take an agent's answer, unless it is no longer awaited."""
        with self._changed:
            if number in self._answers:
                self._answers[number][agent_id] = value
                self._changed.notify_all()

    def keep(self, node_id: int, generation: int, lines: Lines) -> None:
        """Take the last lines of a child that has ended."""
        with self._changed:
            self._last[node_id] = generation, lines

    def _ask(self, node_ids: Iterable[int], question: Question, deadline: Deadline) -> Any:
        """Ask the agents of some nodes; return the answers in time, by node id."""
        number, answers = next(self._numbers), dict[str, Any]()
        with self._changed:
            agents = agents_of(self._view.state)
            asked = {agents[n].agent_id: n for n in node_ids if n in agents}
            self._answers[number] = answers
        if self._soon(self._send_all, list(asked), question(number)):
            self._changed.wait_for(lambda: len(answers) == len(asked), deadline)
        with self._changed:
            # From here on `answer` drops answers that come too late.
            del self._answers[number]
            return {asked[agent_id]: answer for agent_id, answer in answers.items()}

    def _send_all(self, agent_ids: Iterable[str], message: ToAgent) -> None:
        for agent_id in agent_ids:
            self._send(agent_id, message)
