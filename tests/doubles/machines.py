"""Holds state machines to the states that their handlers declare, while tests play them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest

from scripts.diagrams import next_states


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


def checked(key: Any, handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return the handler; it raises where it leads to a state that its type does not name."""
    declared = next_states(handler, key[0] if isinstance(key, tuple) else key)

    @wraps(handler)
    def call(*arguments: Any) -> Any:
        after, actions = handler(*arguments)
        assert type(after) in declared, f"{key}: {handler.__name__} led to {type(after).__name__}"
        return after, actions

    return call
