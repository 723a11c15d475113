"""The lookup of a transition in a table, shared by all pure state machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sparkdl.core.errors import IllegalTransitionError

State = TypeVar("State")
Step = TypeVar("Step")


def transition(
    table: Mapping[tuple[type, type], Callable[[Any, Any, float], Step]],
    state: object,
    event: object,
    now_s: float,
) -> Step:
    """Return what the handler in `table` for the types of `state` and `event` makes of them."""
    handler = table.get((type(state), type(event)))
    if handler is None:
        raise IllegalTransitionError(f"{type(event).__name__} in {type(state).__name__}")
    return handler(state, event, now_s)


def stay(state: State, event: object, now_s: float) -> tuple[State, list[Any]]:
    """Change nothing and do nothing: the handler of an event that is expected here."""
    return state, []
