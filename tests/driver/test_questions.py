"""Questions to the nodes: one number for all, answers by node, and what is said of silent ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparkdl.control.messages import FetchStacks, Hello, ToAgent
from sparkdl.core.deadline import Deadline
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.driver.lifecycle import state as states
from sparkdl.driver.lifecycle.state import Agent, Roster
from sparkdl.driver.questions import Questions
from sparkdl.driver.threads import Changed
from sparkdl.driver.view import View
from tests.doubles.nodes import SOON_S

NODES = plan_nodes(3)
SEATS = {n: Agent(Hello(n, "", f"agent-{n}", "h", n, "", "3", "task")) for n in (0, 1)}
VIEW = View(states.Gathering(Roster(ClusterSpec("c", NODES), SEATS), 0, 0.0))


def asked(answers: dict[str, str]) -> tuple[list[tuple[str, ToAgent]], Questions]:
    """Return what is sent, and the questions to agents that answer so at once."""
    sent: list[tuple[str, ToAgent]] = []

    def soon(function: Callable[..., object], *arguments: Any) -> bool:
        function(*arguments)
        return True

    def send(agent_id: str, message: ToAgent) -> None:
        sent.append((agent_id, message))
        assert isinstance(message, FetchStacks)
        if agent_id in answers:
            questions.answer(agent_id, message.request, answers[agent_id])
        questions.answer(agent_id, message.request + 1, "of another question")

    questions = Questions(NODES, VIEW, Changed(), soon, send, lambda node, lines: ())
    return sent, questions


def test_all_nodes_that_have_an_agent_get_one_message_and_the_others_are_not_waited_for() -> None:
    sent, questions = asked({"agent-0": "first", "agent-1": "second"})
    found = questions.fetch_stacks(Deadline.after(SOON_S))
    assert sent == [("agent-0", FetchStacks(0)), ("agent-1", FetchStacks(0))]
    assert sent[0][1] is sent[1][1], "so that it is encoded once"
    assert (found["worker:0"], found["worker:1"]) == ("first", "second")
    assert "did not answer" in found["worker:2"]


def test_agent_that_is_silent_is_named_when_the_time_is_over_and_answers_later_in_vain() -> None:
    _, questions = asked({"agent-1": "second"})
    found = questions.fetch_stacks(Deadline.after(0.02))
    assert found["worker:1"] == "second"
    assert "did not answer" in found["worker:0"]
    questions.answer("agent-0", 0, "too late")
