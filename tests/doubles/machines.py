"""State machines that tests play, tables of steps, and the states that handlers declare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from itertools import product
from typing import Any, get_args

import pytest

from scripts.generate import next_states


def declared_steps_only(*tables: dict[Any, Callable[..., Any]]) -> Any:
    """Return a fixture by which no handler of `tables` leads where its type, and so docs, do not.

    Args:
        tables: keys are states, or pairs of a state and an event.
    """

    @pytest.fixture(autouse=True, scope="module")
    def check() -> Iterator[None]:
        before = [dict(table) for table in tables]
        for table in tables:
            table.update({key: checked(key, handler) for key, handler in table.items()})
        yield
        for table, handlers in zip(tables, before, strict=True):
            table.update(handlers)

    return check


class Played:
    """A state machine that a test plays, on a clock of its own.

    Args:
        expired: the event of a deadline that has passed.
        tick_s: between two events.

    Attributes:
        actions: what followed from the last event.
    """

    state: Any

    def __init__(self, step: Callable[..., Any], state: Any, expired: Any, tick_s: float) -> None:
        self._step, self._expired, self._tick_s = step, expired, tick_s
        self.state, self.now_s = state, 0.0
        self.actions: list[Any] = []

    def say(self, *events: Any) -> list[Any]:
        """Let things happen; return what follows from the last one."""
        for event in events:
            self.now_s += self._tick_s
            self.state, self.actions = self._step(self.state, event, self.now_s)
        return self.actions

    def expire(self) -> list[Any]:
        """Let the state's deadline pass; return what follows."""
        self.now_s = self.state.deadline_s
        self.state, self.actions = self._step(self.state, self._expired, self.now_s)
        return self.actions


Row = tuple[Any, Any, Any, list[Any]]
"""A state, what happens, the state after, what is done."""


def ignored(state: Any, *events: Any) -> list[Row]:
    """Return the rows of events that change nothing and cause nothing."""
    return [(state, event, state, []) for event in events]


def name_of(row: Row) -> str:
    """Return the id of a row's test."""
    return "-".join(type(each).__name__ for each in row[:3])


def pairs_of(rows: list[Row]) -> set[tuple[type, type]]:
    """Return the types of the states and events that the rows step through."""
    return {(type(before), type(event)) for before, event, _after, _actions in rows}


def illegal(states: Any, events: Any, table: dict[Any, Any]) -> set[tuple[type, type]]:
    """Return the pairs of these unions of types that a table lacks."""
    return set(product(get_args(states), get_args(events))) - table.keys()


def checked(key: Any, handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return the handler; it raises where it leads to a state that its type does not name."""
    declared = next_states(handler, key[0] if isinstance(key, tuple) else key)

    @wraps(handler)
    def call(*arguments: Any) -> Any:
        after, actions = handler(*arguments)
        assert type(after) in declared, f"{key}: {handler.__name__} led to {type(after).__name__}"
        return after, actions

    return call
