"""A node's life, step by step: exactly which state follows, and exactly what the agent does."""

from __future__ import annotations

import math
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.control.channel import Raised, Returned
from sparkdl.core.errors import IllegalTransitionError
from sparkdl.core.failure import Failure
from sparkdl.core.world import World
from sparkdl.node import state as states
from tests.doubles.machines import declared_steps_only

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

STEPS: list[tuple[states.State, states.Event, states.State, list[states.Action]]] = [
    # Ready: a child waits for its world.
    (READY, BEGAN, BEGUN, [states.StartChild(WORLD)]),
    (READY, states.WorldBegan(World(0, ())), READY, []),
    (READY, states.WorldBegan(World(2, ())), READY, []),
    (READY, RETURNED, RETURNING, HAS_ENDED),
    (READY, RAISED, RAISING, HAS_RAISED),
    (READY, EXITED, IDLE, [*HAS_EXITED, states.ReportFailed(1, None, 0)]),
    (READY, SEGFAULTED, IDLE, [*HAS_CRASHED, states.ReportFailed(1, None, -11)]),
    (READY, states.RoundRequested(2), ENDING_ROUND, ENDS),
    (READY, states.RoundRequested(1), READY, []),
    (READY, states.RoundRequested(0), READY, []),
    (READY, STOP_CHILD, ENDING_IDLE, ENDS),
    (READY, states.ChildStopRequested(0, 3.0), READY, []),
    (READY, STOP_FAILED, ENDING_IDLE, ALL_FAILED),
    (READY, STOP, ENDING_GONE, ENDS),
    (READY, ORPHANED, GONE, GOES),
    # Begun: the child has its world.
    (BEGUN, BEGAN, BEGUN, []),
    (BEGUN, ENTERED, BEGUN, [states.ReportRunning(1)]),
    (BEGUN, RETURNED, RETURNING, HAS_ENDED),
    (BEGUN, RAISED, RAISING, HAS_RAISED),
    (BEGUN, EXITED, IDLE, [*HAS_EXITED, states.ReportFailed(1, None, 0)]),
    (BEGUN, states.RoundRequested(2), ENDING_ROUND, ENDS),
    (BEGUN, states.RoundRequested(1), BEGUN, []),
    (BEGUN, STOP_CHILD, ENDING_IDLE, ENDS),
    (BEGUN, states.ChildStopRequested(0, 3.0), BEGUN, []),
    (BEGUN, STOP_FAILED, ENDING_IDLE, ALL_FAILED),
    (BEGUN, STOP, ENDING_GONE, ENDS),
    (BEGUN, ORPHANED, GONE, GOES),
    # Leaving: the outcome is known, and told once the process has ended.
    (RETURNING, RAISED, RETURNING, []),
    (RETURNING, EXITED, IDLE, [states.Kill(), states.ReportReturned(1, RESULT)]),
    (RETURNING, SEGFAULTED, IDLE, [states.Kill(), states.ReportReturned(1, RESULT)]),
    (RAISING, states.ChildExited(1), IDLE, [states.Kill(), states.ReportFailed(1, ERROR, None)]),
    (RETURNING, EXPIRED, KILLED, [states.Kill()]),
    (KILLED, states.ChildExited(-9), IDLE, [states.Kill(), states.ReportReturned(1, RESULT)]),
    (RETURNING, BEGAN, RETURNING, []),
    (RETURNING, states.RoundRequested(2), ENDING_ROUND, ENDS),
    (RETURNING, states.RoundRequested(1), RETURNING, []),
    (RETURNING, STOP_CHILD, ENDING_IDLE, ENDS),
    (RETURNING, states.ChildStopRequested(0, 3.0), RETURNING, []),
    (RETURNING, STOP, ENDING_GONE, ENDS),
    (RETURNING, ORPHANED, GONE, GOES),
    # Ending: the child was told to go; what follows may change, the time only shrinks.
    (ENDING_IDLE, EXITED, IDLE, [states.Kill()]),
    (ENDING_ROUND, EXITED, states.Ready(2), [states.Kill(), states.Spawn(2)]),
    (ENDING_GONE, EXITED, GONE, [states.Kill(), states.End("stopped")]),
    (ENDING_IDLE, EXPIRED, states.Ending("idle", 1, math.inf), [states.Kill()]),
    (ENDING_ROUND, EXPIRED, states.Ending("round", 2, math.inf), [states.Kill()]),
    (ENDING_GONE, EXPIRED, states.Ending("gone", 1, math.inf), [states.Kill()]),
    (ENDING_IDLE, states.RoundRequested(2), states.Ending("round", 2, 13.0), []),
    (ENDING_IDLE, states.RoundRequested(1), ENDING_IDLE, []),
    (ENDING_ROUND, states.RoundRequested(3), states.Ending("round", 3, 10.0), []),
    (ENDING_ROUND, states.RoundRequested(1), ENDING_ROUND, []),
    (ENDING_GONE, states.RoundRequested(2), ENDING_GONE, []),
    (ENDING_IDLE, STOP, ENDING_GONE, []),
    (ENDING_ROUND, STOP, states.Ending("gone", 2, 10.0), []),
    (states.Ending("idle", 1, 30.0), states.StopRequested(1.0), states.Ending("gone", 1, 11.0), []),
    (states.Ending("idle", 1, math.inf), STOP, ENDING_GONE, []),
    (ENDING_IDLE, STOP_CHILD, ENDING_IDLE, []),
    (ENDING_IDLE, BEGAN, ENDING_IDLE, []),
    (ENDING_IDLE, ENTERED, ENDING_IDLE, []),
    (ENDING_IDLE, RETURNED, ENDING_IDLE, []),
    (ENDING_IDLE, ORPHANED, GONE, GOES),
    # Idle: the log is still here.
    (IDLE, BEGAN, IDLE, []),
    (IDLE, states.RoundRequested(2), states.Ready(2), [states.Spawn(2)]),
    (IDLE, states.RoundRequested(1), IDLE, []),
    (IDLE, STOP_CHILD, IDLE, []),
    (IDLE, STOP_FAILED, IDLE, [WHY]),
    (IDLE, STOP, GONE, [states.End("stopped")]),
    (IDLE, ORPHANED, GONE, GOES),
    # Gone: nothing matters any more.
    (GONE, BEGAN, GONE, []),
    (GONE, ENTERED, GONE, []),
    (GONE, RETURNED, GONE, []),
    (GONE, EXITED, GONE, []),
    (GONE, states.RoundRequested(2), GONE, []),
    (GONE, STOP_CHILD, GONE, []),
    (GONE, STOP, GONE, []),
    (GONE, ORPHANED, GONE, []),
]
"""At 10 s: state, what happens, the state after, what is done."""


def name_of(row: tuple[states.State, states.Event, states.State, list[states.Action]]) -> str:
    before, event, after, _actions = row
    return f"{type(before).__name__}-{type(event).__name__}-{type(after).__name__}"


@pytest.mark.parametrize("row", STEPS, ids=name_of)
def test_step(row: tuple[states.State, states.Event, states.State, list[states.Action]]) -> None:
    before, event, after, actions = row
    assert states.step(before, event, 10.0) == (after, actions)


def test_every_legal_pair_is_stepped_through() -> None:
    tried = {(type(before), type(event)) for before, event, _after, _actions in STEPS}
    assert tried == set(states.TRANSITIONS)


ONE_OF_EACH: dict[type, Any] = {
    type(one): one
    for one in (
        *(READY, BEGUN, RETURNING, ENDING_IDLE, IDLE, GONE, BEGAN, ENTERED, RETURNED, EXITED),
        *(states.RoundRequested(2), STOP_CHILD, STOP, ORPHANED, EXPIRED),
    )
}
ILLEGAL = [
    (state, event)
    for state in typing.get_args(states.State)
    for event in typing.get_args(states.Event)
    if (state, event) not in states.TRANSITIONS
]


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
    assert set(ILLEGAL) == no_deadline | no_child | no_world_yet | last_words_spoken


@pytest.mark.parametrize(("state", "event"), ILLEGAL)
def test_an_illegal_pair_raises_and_names_both(state: type, event: type) -> None:
    with pytest.raises(IllegalTransitionError, match=f"(?m)^{event.__name__} in {state.__name__}$"):
        states.step(ONE_OF_EACH[state], ONE_OF_EACH[event], 0.0)


def test_a_finished_node_does_another_round_with_a_new_child() -> None:
    state: states.State = states.Ready(0)
    story: list[states.Action] = []
    for event in (
        *(states.WorldBegan(World(0, ())), ENTERED, RETURNED, EXITED),
        *(states.RoundRequested(1), BEGAN, ENTERED, RAISED, states.ChildExited(1), STOP),
    ):
        state, actions = states.step(state, event, 10.0)
        story += actions
    assert state == GONE
    assert story == [
        *(states.StartChild(World(0, ())), states.ReportRunning(0), *HAS_ENDED),
        *(states.Kill(), states.ReportReturned(0, RESULT)),
        *(states.Spawn(1), states.StartChild(WORLD), states.ReportRunning(1), *HAS_RAISED),
        *(states.Kill(), states.ReportFailed(1, ERROR, None)),
        states.End("stopped"),
    ]


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
