"""Draws the state machines into docs/design.md: `python -m scripts.diagrams`.

What leads where comes from the tables of transitions, and from the types of the handlers in them:
one that returns `Step[Running | Failing]` leads to these two. mypy holds the handlers to that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

from sparkdl.driver.feeds import transitions as feed
from sparkdl.driver.feeds.state import Idle
from sparkdl.driver.lifecycle import transitions as cluster
from sparkdl.driver.lifecycle.state import Gathering
from sparkdl.node import state as node

DESIGN = Path(__file__).parent.parent / "docs" / "design.md"


class Machine(NamedTuple):
    """A state machine.

    Attributes:
        looks: handlers of no event: what is done in a state as soon as it can be.
    """

    first: type
    transitions: Mapping[tuple[type, type], Callable[..., Any]]
    looks: Mapping[type, Callable[..., Any]] = {}


MACHINES = {
    "cluster": Machine(Gathering, cluster.TRANSITIONS),
    "feed": Machine(Idle, feed.TRANSITIONS, feed.LOOKS),
    "node": Machine(node.Ready, node.TRANSITIONS),
}


def next_states(handler: Callable[..., Any], state: type) -> set[type]:
    """Return what may follow `state`, by the handler's type."""
    after, _ = get_args(get_type_hints(handler)["return"])
    return {state if isinstance(each, TypeVar) else each for each in get_args(after) or (after,)}


def edges(machine: Machine) -> dict[tuple[type, type], list[str]]:
    """Return the events that lead from one state to another; none where a look does."""
    found: dict[tuple[type, type], list[str]] = {}
    for state, look in machine.looks.items():
        for after in next_states(look, state) - {state}:
            found.setdefault((state, after), [])
    for (state, event), handler in machine.transitions.items():
        for after in next_states(handler, state) - {state}:
            found.setdefault((state, after), []).append(event.__name__)
    return found


def drawn(machine: Machine) -> str:
    """Return the diagram, in the language of Mermaid."""
    states = [*dict.fromkeys(state for state, _ in machine.transitions)]
    found = edges(machine)
    lines = ["stateDiagram-v2", f"[*] --> {machine.first.__name__}"]
    for state, after in sorted(found, key=lambda edge: [_place(states, each) for each in edge]):
        events = "<br>".join(sorted(found[state, after]))
        lines.append(f"{state.__name__} --> {after.__name__}" + (f": {events}" if events else ""))
    return "\n    ".join(lines)


def _place(states: list[type], state: type) -> int:
    return states.index(state) if state in states else len(states)


def with_diagrams(text: str) -> str:
    """Return a page whose diagrams, between their markers, are those of the machines."""
    for name, machine in MACHINES.items():
        marks = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        pattern = re.escape(marks[0]) + ".*?" + re.escape(marks[1])
        before, *old, after = re.split(pattern, text, flags=re.DOTALL)
        assert not old, f"the page has several places for the diagram of a {name}"
        text = f"{before}{marks[0]}```mermaid\n{drawn(machine)}\n```\n{marks[1]}{after}"
    return text


if __name__ == "__main__":
    DESIGN.write_text(with_diagrams(DESIGN.read_text(encoding="utf-8")), encoding="utf-8")
