"""A node's life, step by step: exactly which state follows, and exactly what the agent does."""

from __future__ import annotations

import math
from itertools import product
from typing import get_args

import pytest

from sparkdl.control.channel import Raised
from sparkdl.control.messages import ChildReturned
from sparkdl.core.errors import IllegalTransitionError
from sparkdl.core.failure import Failure
from sparkdl.core.world import World
from sparkdl.node import state as states
from tests.doubles.machines import declared_steps_only

steps_are_declared = declared_steps_only(states.TRANSITIONS)

WORLD = World(1, ())
RESULT = ChildReturned(1, b"42")
FAILURE = Failure("worker:0", "exception", "ValueError: no", 1.0)
ERROR = Raised(FAILURE, 9.0)

READY = states.Ready(1)
RUNNING = states.Running(1)
RETURNING = states.Leaving(1, RESULT, 10.0 + states.EXIT_GRACE_S)
RAISING = states.Leaving(1, ERROR, 10.0 + states.EXIT_GRACE_S)
KILLED = states.Leaving(1, RESULT, math.inf)
ENDING_IDLE = states.Ending("idle", 1, 13.0)
ENDING_ROUND = states.Ending("round", 2, 10.0)
ENDING_GONE = states.Ending("gone", 1, 13.0)
IDLE = states.Idle(1)
ENDED = states.Ended()

BEGAN = states.WorldBegan(WORLD)
RETURNED = states.ChildReportedEnd(RESULT)
RAISED = states.ChildReportedEnd(ERROR)
EXITED = states.ChildExited(0)
SEGFAULTED = states.ChildExited(-11)
STOP_CHILD = states.ChildStopRequested(1, grace_s=3.0)
STOP_FAILED = states.ChildStopRequested(1, 3.0, "worker:0 raised ValueError")
STOP = states.StopRequested(grace_s=3.0)
OWNER_LOST = states.OwnerLost("the executor is gone")
EXPIRED = states.DeadlinePassed()

ENDS: list[states.Action] = [states.CloseFeeds("the node ends"), states.Terminate()]
WHY = states.CloseFeeds(
    "[SPARKDL-CLUSTER-FAILED] the cluster has failed: worker:0 raised ValueError"
)
ALL_FAILED: list[states.Action] = [WHY, states.Terminate()]
HAS_ENDED: list[states.Action] = [states.CloseFeeds("map_fun has ended")]
HAS_RAISED: list[states.Action] = [states.CloseFeeds(FAILURE.describe())]
HAS_EXITED: list[states.Action] = [
    states.CloseFeeds("the child has died (exit code 0)"),
    states.Kill(),
]
HAS_CRASHED: list[states.Action] = [
    states.CloseFeeds("the child has died (SIGSEGV)"),
    states.Kill(),
]
GOES: list[states.Action] = [states.Kill(), states.CloseFeeds("the executor is gone")]

Row = tuple[states.State, states.Event, states.State, list[states.Action]]
"""A state, what happens, the state after, what is done."""


def ignored(state: states.State, *events: states.Event) -> list[Row]:
    """Return the rows of events that change nothing and cause nothing."""
    return [(state, event, state, []) for event in events]


STEPS: list[Row] = [
    # Ready: a child waits for its world.
    (READY, BEGAN, RUNNING, [states.StartChild(WORLD)]),
    (READY, RETURNED, RETURNING, HAS_ENDED),
    (READY, RAISED, RAISING, HAS_RAISED),
    (READY, EXITED, IDLE, [*HAS_EXITED, states.ReportEnd(1, 0)]),
    (READY, SEGFAULTED, IDLE, [*HAS_CRASHED, states.ReportEnd(1, -11)]),
    (READY, states.RoundRequested(2), ENDING_ROUND, ENDS),
    (READY, STOP_CHILD, ENDING_IDLE, ENDS),
    (READY, STOP_FAILED, ENDING_IDLE, ALL_FAILED),
    (READY, STOP, ENDING_GONE, ENDS),
    (READY, OWNER_LOST, ENDED, GOES),
    *ignored(READY, states.WorldBegan(World(0, ())), states.WorldBegan(World(2, ())),
             states.RoundRequested(1), states.RoundRequested(0),
             states.ChildStopRequested(0, 3.0)),
    # Running: the child has its world.
    (RUNNING, RETURNED, RETURNING, HAS_ENDED),
    (RUNNING, RAISED, RAISING, HAS_RAISED),
    (RUNNING, EXITED, IDLE, [*HAS_EXITED, states.ReportEnd(1, 0)]),
    (RUNNING, states.RoundRequested(2), ENDING_ROUND, ENDS),
    (RUNNING, STOP_CHILD, ENDING_IDLE, ENDS),
    (RUNNING, STOP_FAILED, ENDING_IDLE, ALL_FAILED),
    (RUNNING, STOP, ENDING_GONE, ENDS),
    (RUNNING, OWNER_LOST, ENDED, GOES),
    *ignored(RUNNING, BEGAN, states.RoundRequested(1), states.ChildStopRequested(0, 3.0)),
    # Leaving: the outcome is known, and told once the process has ended.
    (RETURNING, EXITED, IDLE, [states.Kill(), states.ReportEnd(1, RESULT)]),
    (RETURNING, SEGFAULTED, IDLE, [states.Kill(), states.ReportEnd(1, RESULT)]),
    (RAISING, states.ChildExited(1), IDLE, [states.Kill(), states.ReportEnd(1, ERROR)]),
    (RETURNING, EXPIRED, KILLED, [states.Kill()]),
    (KILLED, states.ChildExited(-9), IDLE, [states.Kill(), states.ReportEnd(1, RESULT)]),
    (RETURNING, states.RoundRequested(2), ENDING_ROUND, ENDS),
    (RETURNING, STOP_CHILD, ENDING_IDLE, ENDS),
    (RETURNING, STOP, ENDING_GONE, ENDS),
    (RETURNING, OWNER_LOST, ENDED, GOES),
    *ignored(RETURNING, RAISED, BEGAN, states.RoundRequested(1),
             states.ChildStopRequested(0, 3.0)),
    # Ending: the child was told to go; what follows may change, the time only shrinks.
    (ENDING_IDLE, EXITED, IDLE, [states.Kill()]),
    (ENDING_ROUND, EXITED, states.Ready(2), [states.Kill(), states.Spawn(2)]),
    (ENDING_GONE, EXITED, ENDED, [states.Kill()]),
    (ENDING_IDLE, EXPIRED, states.Ending("idle", 1, math.inf), [states.Kill()]),
    (ENDING_ROUND, EXPIRED, states.Ending("round", 2, math.inf), [states.Kill()]),
    (ENDING_GONE, EXPIRED, states.Ending("gone", 1, math.inf), [states.Kill()]),
    (ENDING_IDLE, states.RoundRequested(2), states.Ending("round", 2, 13.0), []),
    (ENDING_ROUND, states.RoundRequested(3), states.Ending("round", 3, 10.0), []),
    (ENDING_IDLE, STOP, ENDING_GONE, []),
    (ENDING_ROUND, STOP, states.Ending("gone", 2, 10.0), []),
    (states.Ending("idle", 1, 30.0), states.StopRequested(1.0), states.Ending("gone", 1, 11.0), []),
    (states.Ending("idle", 1, math.inf), STOP, ENDING_GONE, []),
    (ENDING_IDLE, OWNER_LOST, ENDED, GOES),
    *ignored(ENDING_IDLE, states.RoundRequested(1), STOP_CHILD, BEGAN, RETURNED),
    (ENDING_ROUND, states.RoundRequested(1), ENDING_ROUND, []),
    (ENDING_GONE, states.RoundRequested(2), ENDING_GONE, []),
    # Idle: the log is still here.
    (IDLE, states.RoundRequested(2), states.Ready(2), [states.Spawn(2)]),
    (IDLE, STOP_FAILED, IDLE, [WHY]),
    (IDLE, STOP, ENDED, []),
    (IDLE, OWNER_LOST, ENDED, GOES),
    *ignored(IDLE, BEGAN, states.RoundRequested(1), STOP_CHILD),
]  # fmt: skip
"""At 10 s: state, what happens, the state after, what is done."""


@pytest.mark.parametrize("row", STEPS, ids=lambda row: "-".join(type(x).__name__ for x in row[:3]))
def test_step(row: Row) -> None:
    before, event, after, actions = row
    assert states.step(before, event, 10.0) == (after, actions)


def test_every_legal_pair_is_stepped_through() -> None:
    assert {(type(row[0]), type(row[1])) for row in STEPS} == set(states.TRANSITIONS)


def test_what_no_child_and_no_timer_does_is_illegal() -> None:
    no_deadline = {
        (state, states.DeadlinePassed) for state in (states.Ready, states.Running, states.Idle)
    }
    is_over = {(states.Ended, event) for event in get_args(states.Event)}
    no_child = {(states.Idle, event) for event in (states.ChildReportedEnd, states.ChildExited)}
    pairs = set(product(get_args(states.State), get_args(states.Event)))
    assert pairs - states.TRANSITIONS.keys() == no_deadline | no_child | is_over
    with pytest.raises(IllegalTransitionError, match=r"(?m)^ChildExited in Idle$"):
        states.step(IDLE, EXITED, 0.0)
