"""The driver's questions to the nodes: their last lines and stacks.

Runs in: driver
"""

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

MAX_LINES = 1000
"""Lines kept of a node's ended children."""
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
        self._last: dict[int, dict[int, Lines]] = {}
        """The last lines of ended children, by node id and generation."""

    def fetch_log(self, node_id: int, lines: int, deadline: Deadline) -> Lines:
        """Return the last lines of a node's child; the stored ones if the node is gone."""
        attempts = self._attempts(node_id, lines, deadline)
        return attempts[max(attempts)][-lines:] if attempts and lines > 0 else ()

    def fetch_logs(self, node_id: int, lines: int, deadline: Deadline) -> Lines:
        """Return the last lines of all children of a node, under a heading for each if several."""
        attempts = self._attempts(node_id, lines, deadline)
        found: list[str] = []
        for number, printed in sorted(attempts.items()):
            heading = f"sparkdl: attempt {number + 1} (generation {number})"
            found += [heading, *printed] if len(attempts) > 1 else printed
        return tuple(found[-lines:]) if lines > 0 else ()

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
        """Take the last lines of a child that has ended; the oldest children's go."""
        with self._changed:
            kept = self._last.setdefault(node_id, {})
            kept[generation] = lines
            while len(kept) > 1 and sum(map(len, kept.values())) > MAX_LINES:
                del kept[min(kept)]

    def _attempts(self, node_id: int, lines: int, deadline: Deadline) -> dict[int, Lines]:
        """Return the last lines of a node's children, by generation."""
        answer = self._ask([node_id], lambda number: FetchLog(number, lines), deadline).get(node_id)
        with self._changed:
            kept = dict(self._last.get(node_id, {}))
            generation = generation_of(before_stop(self._view.state)) or 0
        if answer is not None:
            now, printed = answer
            return {number: last for number, last in kept.items() if number < now} | {now: printed}
        if kept and max(kept) >= generation:
            return kept
        # The agent is lost with its unsent lines. The file has those of all the node's children.
        names = [node.name for node in self._nodes if node.node_id == node_id]
        written = self._written(names[0], lines) if names else ()
        return {generation: written} if written else kept

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
