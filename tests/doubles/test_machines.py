"""Diagrams show what handlers declare, and handlers that lead elsewhere are found."""

from __future__ import annotations

from typing import TypeVar

import pytest

from scripts.diagrams import Machine, drawn, next_states
from tests.doubles.machines import checked


class Open:
    """A state."""


class Shut:
    """Another one."""


class Slammed:
    """An event."""


S = TypeVar("S", Open, Shut)


def stay(state: S, event: Slammed) -> tuple[S, list[str]]:
    return state, []


def shut(state: Open, event: Slammed) -> tuple[Open | Shut, list[str]]:
    return Shut(), []


def opens(state: Shut) -> tuple[Open, list[str]]:
    return Shut(), []  # type: ignore[return-value]


def test_handler_leads_where_its_type_says() -> None:
    assert next_states(stay, Shut) == {Shut}
    assert next_states(shut, Open) == {Open, Shut}
    machine = Machine(Open, {(Open, Slammed): shut, (Shut, Slammed): stay}, {Shut: opens})
    assert drawn(machine).splitlines() == [
        "stateDiagram-v2",
        "    [*] --> Open",
        "    Open --> Shut: Slammed",
        "    Shut --> Open",
    ]


def test_handler_that_leads_elsewhere_is_found() -> None:
    assert checked((Open, Slammed), shut)(Open(), Slammed())
    with pytest.raises(AssertionError, match="opens led to Shut"):
        checked(Shut, opens)(Shut())
