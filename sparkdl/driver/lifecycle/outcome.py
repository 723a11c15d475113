"""What a state of the cluster means to those who wait for it: for its end, or while feeding. Pure.

Runs in: driver
"""

from __future__ import annotations

from typing import Any

from sparkdl.core.errors import FeedClosedError, SparkdlError, node_error
from sparkdl.driver.lifecycle.state import (
    Failed,
    Failing,
    Finished,
    Gathering,
    Running,
    Stopped,
    Stopping,
)


def is_decided(state: Any) -> bool:
    """Whether it is known what follows from what has happened: no node is awaited, none failed."""
    return not isinstance(state, (Gathering, Failing))


def status_of(state: Any) -> str:
    """Return the state in a word, with the restarts so far and the reason of the last one."""
    history = getattr(getattr(before_stop(state), "roster", None), "history", None)
    if history is None or history.cause is None:
        return type(state).__name__
    number, cause = len(history.restarts_s), history.cause.headline().splitlines()[0]
    return f"{type(state).__name__} (restart {number} because {cause})"


def away_of(state: Any) -> frozenset[int]:
    """Return the nodes that the others go on without, for now or for good."""
    return state.alone | state.left if isinstance(state, Running) else frozenset()


def has_ended(state: Any) -> bool:
    """Whether no `map_fun` is waited for any more."""
    return isinstance(state, (Finished, Failed, Stopping, Stopped))


def is_empty(state: Any) -> bool:
    """Whether the cluster has ended, by itself or not, and its agents with it."""
    is_over = isinstance(state, (Finished, Failed))
    return isinstance(state, Stopped) or (is_over and not state.roster.is_anybody_there)


def before_stop(state: Any) -> Any:
    """Return the state in which the stop came; the state itself if none came."""
    while isinstance(state, (Stopping, Stopped)):
        state = state.before
    return state


def generation_of(state: Any) -> int | None:
    """Return the number of the world that is or is about to be; `None` after the end."""
    if isinstance(state, Gathering):
        return state.generation
    return state.world.generation if isinstance(state, (Running, Failing, Finished)) else None


def failure_of(state: Any) -> SparkdlError | None:
    """Return the error of a cluster that has failed, whether it has been stopped since or not."""
    last = before_stop(state)
    if isinstance(last, Failed):
        return node_error(last.failures, last.note) if last.failures else last.problem
    if last is not state and isinstance(last, Failing):  # and nobody decides any more
        return node_error(last.failures)
    if last is not state and isinstance(last, Gathering) and last.failures:
        return node_error(last.failures, "the cluster was stopped before all had begun anew")
    return None


def feed_problem_of(state: Any) -> SparkdlError | None:
    """Return why a cluster cannot be fed any more."""
    problem = failure_of(state)
    if problem is None and isinstance(state, (Stopping, Stopped)):
        return FeedClosedError("the cluster was shut down while it was being fed")
    return problem
