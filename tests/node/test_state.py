"""A node's life, step by step: exactly which state follows, and exactly what the agent does."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.control.channel import Raised, Returned
from sparkdl.core.errors import IllegalTransitionError
from sparkdl.core.failure import Failure
from sparkdl.core.world import World
from sparkdl.node import state as states
from tests.doubles.machines import Row, declared_steps_only, ignored, illegal, name_of, pairs_of

steps_are_declared = declared_steps_only(states.TRANSITIONS)

WORLD = World(1, ())
RESULT = Returned(b"42")
FAILURE = Failure("worker:0", "exception", "ValueError: no", 1.0)
ERROR = Raised(FAILURE, 9.0)

READY = states.Ready(1)
BEGUN = states.Begun(1, WORLD)
RETURNING = states.Leaving(1, RESULT, 10.0 + states.EXIT_GRACE_S)
RAISING = states.Leaving(1, ERROR, 10.0 + states.EXIT_GRACE_S)
KILLED = states.Leaving(1, RESULT, math.inf)
ENDING_IDLE = states.Ending("idle", 1, 13.0)
ENDING_ROUND = states.Ending("round", 2, 10.0)
ENDING_GONE = states.Ending("gone", 1, 13.0)
IDLE = states.Idle(1)
GONE = states.Gone()

BEGAN = states.WorldBegan(WORLD)
ENTERED = states.ChildEnteredMapFun()
RETURNED = states.ChildReportedEnd(RESULT)
RAISED = states.ChildReportedEnd(ERROR)
EXITED = states.ChildExited(0)
SEGFAULTED = states.ChildExited(-11)
STOP_CHILD = states.ChildStopRequested(1, grace_s=3.0)
STOP_FAILED = states.ChildStopRequested(1, 3.0, "worker:0 raised ValueError")
STOP = states.StopRequested(grace_s=3.0)
ORPHANED = states.Orphaned("the executor is gone")
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
GOES: list[states.Action] = [
    states.Kill(),
    states.CloseFeeds("the executor is gone"),
    states.End("the executor is gone"),
]

STEPS: list[Row] = [
    # Ready: a child waits for its world.
    (READY, BEGAN, BEGUN, [states.StartChild(WORLD)]),
    (READY, RETURNED, RETURNING, HAS_ENDED),
    (READY, RAISED, RAISING, HAS_RAISED),
    (READY, EXITED, IDLE, [*HAS_EXITED, states.ReportFailed(1, None, 0)]),
    (READY, SEGFAULTED, IDLE, [*HAS_CRASHED, states.ReportFailed(1, None, -11)]),
    (READY, states.RoundRequested(2), ENDING_ROUND, ENDS),
    (READY, STOP_CHILD, ENDING_IDLE, ENDS),
    (READY, STOP_FAILED, ENDING_IDLE, ALL_FAILED),
    (READY, STOP, ENDING_GONE, ENDS),
    (READY, ORPHANED, GONE, GOES),
    *ignored(READY, states.WorldBegan(World(0, ())), states.WorldBegan(World(2, ())),
             states.RoundRequested(1), states.RoundRequested(0),
             states.ChildStopRequested(0, 3.0)),
    # Begun: the child has its world.
    (BEGUN, ENTERED, BEGUN, [states.ReportRunning(1)]),
    (BEGUN, RETURNED, RETURNING, HAS_ENDED),
    (BEGUN, RAISED, RAISING, HAS_RAISED),
    (BEGUN, EXITED, IDLE, [*HAS_EXITED, states.ReportFailed(1, None, 0)]),
    (BEGUN, states.RoundRequested(2), ENDING_ROUND, ENDS),
    (BEGUN, STOP_CHILD, ENDING_IDLE, ENDS),
    (BEGUN, STOP_FAILED, ENDING_IDLE, ALL_FAILED),
    (BEGUN, STOP, ENDING_GONE, ENDS),
    (BEGUN, ORPHANED, GONE, GOES),
    *ignored(BEGUN, BEGAN, states.RoundRequested(1), states.ChildStopRequested(0, 3.0)),
    # Leaving: the outcome is known, and told once the process has ended.
    (RETURNING, EXITED, IDLE, [states.Kill(), states.ReportReturned(1, RESULT)]),
    (RETURNING, SEGFAULTED, IDLE, [states.Kill(), states.ReportReturned(1, RESULT)]),
    (RAISING, states.ChildExited(1), IDLE, [states.Kill(), states.ReportFailed(1, ERROR, None)]),
    (RETURNING, EXPIRED, KILLED, [states.Kill()]),
    (KILLED, states.ChildExited(-9), IDLE, [states.Kill(), states.ReportReturned(1, RESULT)]),
    (RETURNING, states.RoundRequested(2), ENDING_ROUND, ENDS),
    (RETURNING, STOP_CHILD, ENDING_IDLE, ENDS),
    (RETURNING, STOP, ENDING_GONE, ENDS),
    (RETURNING, ORPHANED, GONE, GOES),
    *ignored(RETURNING, RAISED, BEGAN, states.RoundRequested(1),
             states.ChildStopRequested(0, 3.0)),
    # Ending: the child was told to go; what follows may change, the time only shrinks.
    (ENDING_IDLE, EXITED, IDLE, [states.Kill()]),
    (ENDING_ROUND, EXITED, states.Ready(2), [states.Kill(), states.Spawn(2)]),
    (ENDING_GONE, EXITED, GONE, [states.Kill(), states.End("stopped")]),
    (ENDING_IDLE, EXPIRED, states.Ending("idle", 1, math.inf), [states.Kill()]),
    (ENDING_ROUND, EXPIRED, states.Ending("round", 2, math.inf), [states.Kill()]),
    (ENDING_GONE, EXPIRED, states.Ending("gone", 1, math.inf), [states.Kill()]),
    (ENDING_IDLE, states.RoundRequested(2), states.Ending("round", 2, 13.0), []),
    (ENDING_ROUND, states.RoundRequested(3), states.Ending("round", 3, 10.0), []),
    (ENDING_IDLE, STOP, ENDING_GONE, []),
    (ENDING_ROUND, STOP, states.Ending("gone", 2, 10.0), []),
    (states.Ending("idle", 1, 30.0), states.StopRequested(1.0), states.Ending("gone", 1, 11.0), []),
    (states.Ending("idle", 1, math.inf), STOP, ENDING_GONE, []),
    (ENDING_IDLE, ORPHANED, GONE, GOES),
    *ignored(ENDING_IDLE, states.RoundRequested(1), STOP_CHILD, BEGAN, ENTERED, RETURNED),
    (ENDING_ROUND, states.RoundRequested(1), ENDING_ROUND, []),
    (ENDING_GONE, states.RoundRequested(2), ENDING_GONE, []),
    # Idle: the log is still here.
    (IDLE, states.RoundRequested(2), states.Ready(2), [states.Spawn(2)]),
    (IDLE, STOP_FAILED, IDLE, [WHY]),
    (IDLE, STOP, GONE, [states.End("stopped")]),
    (IDLE, ORPHANED, GONE, GOES),
    *ignored(IDLE, BEGAN, states.RoundRequested(1), STOP_CHILD),
    # Gone: nothing matters any more.
    *ignored(GONE, BEGAN, ENTERED, RETURNED, EXITED, states.RoundRequested(2), STOP_CHILD, STOP,
             ORPHANED),
]  # fmt: skip
"""At 10 s: state, what happens, the state after, what is done."""


@pytest.mark.parametrize("row", STEPS, ids=name_of)
def test_step(row: Row) -> None:
    before, event, after, actions = row
    assert states.step(before, event, 10.0) == (after, actions)


def test_every_legal_pair_is_stepped_through() -> None:
    assert pairs_of(STEPS) == set(states.TRANSITIONS)


def test_what_no_child_and_no_timer_does_is_illegal() -> None:
    no_deadline = {
        (state, states.DeadlinePassed)
        for state in (states.Ready, states.Begun, states.Idle, states.Gone)
    }
    no_child = {
        (states.Idle, event)
        for event in (states.ChildEnteredMapFun, states.ChildReportedEnd, states.ChildExited)
    }
    no_world_yet = {(states.Ready, states.ChildEnteredMapFun)}
    last_words_spoken = {(states.Leaving, states.ChildEnteredMapFun)}
    found = illegal(states.State, states.Event, states.TRANSITIONS)
    assert found == no_deadline | no_child | no_world_yet | last_words_spoken
    with pytest.raises(IllegalTransitionError, match=r"(?m)^ChildExited in Idle$"):
        states.step(IDLE, EXITED, 0.0)


# Whatever happens: random events never break what always holds.


class Watcher:
    """A child and a coordinator as an agent's actions make them, and what holds of them."""

    def __init__(self) -> None:
        self.is_alive = False
        self.has_world = False
        self.is_in_map_fun = False
        self.has_spoken = False
        self.has_group = False
        self.spawned: list[int] = []
        self.told: list[int] = []
        self.ends = 0
        self.now_s = 0.0

    def possible(self, state: states.State) -> list[states.Event]:
        """What can happen now: children and timers do only what they can, others anything."""
        generation = getattr(state, "generation", 0)
        events: list[states.Event] = [
            *(states.RoundRequested(g) for g in (generation - 1, generation, generation + 1)),
            *(states.WorldBegan(World(g, ())) for g in (generation, generation, generation + 1)),
            *(states.ChildStopRequested(g, 2.0) for g in (generation, generation + 1)),
            *(states.StopRequested(2.0), ORPHANED),
        ]
        if self.is_alive:
            events += [states.ChildExited(0), states.ChildExited(1), states.ChildExited(-9)]
            if not self.has_spoken:
                events += [RETURNED, RAISED] * 2
            if self.has_world and not self.is_in_map_fun and not self.has_spoken:
                events += [ENTERED] * 3
        if not math.isinf(state.deadline_s):
            events.append(EXPIRED)
        return events

    def happened(self, event: states.Event) -> None:
        if isinstance(event, states.ChildExited):
            self.is_alive = False
        elif isinstance(event, states.ChildEnteredMapFun):
            self.is_in_map_fun = True
        elif isinstance(event, states.ChildReportedEnd):
            self.has_spoken = True

    def did(self, action: states.Action) -> None:
        match action:
            case states.Spawn(generation):
                assert not self.is_alive, "one child at a time"
                assert not self.has_group, "the last child's group is dead"
                assert generation > max(self.spawned, default=-1), "each generation has one child"
                self.spawned.append(generation)
                self.is_alive = self.has_group = True
                self.has_world = self.is_in_map_fun = self.has_spoken = False
            case states.StartChild(world):
                assert not self.has_world, "one world for each child"
                assert world.generation == self.spawned[-1]
                self.has_world = True
            case states.ReportRunning(generation):
                assert self.is_in_map_fun
                assert generation == self.spawned[-1]
            case states.ReportReturned(generation) | states.ReportFailed(generation):
                assert not self.is_alive, "told when the child has ended"
                assert generation == self.spawned[-1]
                assert generation not in self.told, "told once"
                self.told.append(generation)
            case states.Terminate():
                assert self.is_alive
            case states.Kill():
                self.has_group = False
            case states.End():
                self.ends += 1

    def validate(self, before: states.State, state: states.State) -> None:
        assert self.ends == isinstance(state, states.Gone)
        assert not (isinstance(state, states.Gone) and self.has_group), (
            "no child outlives its agent"
        )
        if isinstance(before, states.Gone):
            assert state == before
        if isinstance(state, (states.Ready, states.Begun, states.Leaving, states.Ending)):
            assert self.is_alive, "each of these is about a child"
        if isinstance(state, states.Idle):
            assert not self.is_alive
            assert not self.has_group
        if not isinstance(state, states.Gone):
            assert state.generation >= getattr(before, "generation", 0), "generations only grow"
        if isinstance(state, states.Begun):
            assert self.has_world


@given(st.data())
def test_whatever_happens_the_node_stays_valid(data: st.DataObject) -> None:
    watcher = Watcher()
    state: states.State = states.Ready(0)
    watcher.did(states.Spawn(0))
    for _ in range(data.draw(st.integers(0, 40))):
        # An end is always possible; that it is rare lets the others happen.
        is_end = data.draw(st.integers(0, 19)) == 19
        events = [
            e
            for e in watcher.possible(state)
            if isinstance(e, (states.StopRequested, states.Orphaned)) == is_end
        ]
        event = data.draw(st.sampled_from(events))
        watcher.now_s += 1.0
        watcher.happened(event)
        before, (state, actions) = state, states.step(state, event, watcher.now_s)
        for action in actions:
            watcher.did(action)
        watcher.validate(before, state)
