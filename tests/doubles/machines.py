"""State machines that tests play, and the states that their handlers declare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

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


def checked(key: Any, handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return the handler; it raises where it leads to a state that its type does not name."""
    declared = next_states(handler, key[0] if isinstance(key, tuple) else key)

    @wraps(handler)
    def call(*arguments: Any) -> Any:
        after, actions = handler(*arguments)
        assert type(after) in declared, f"{key}: {handler.__name__} led to {type(after).__name__}"
        return after, actions

    return call
