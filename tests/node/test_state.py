"""A node's life, step by step: exactly which state follows, and exactly what the agent does."""

from __future__ import annotations

import math
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.control.channel import Returned
from sparkdl.core.errors import IllegalTransitionError
from sparkdl.core.failure import Failure
from sparkdl.core.world import World
from sparkdl.node.state import (
    EXIT_GRACE_S,
    TRANSITIONS,
    Action,
    Begun,
    ChildEnteredMapFun,
    ChildExited,
    ChildReportedEnd,
    ChildStopRequested,
    CloseFeeds,
    DeadlinePassed,
    End,
    Ending,
    Event,
    Gone,
    Idle,
    Kill,
    Leaving,
    Orphaned,
    Ready,
    ReportFailed,
    ReportReturned,
    ReportRunning,
    RoundRequested,
    Spawn,
    StartChild,
    State,
    StopRequested,
    Terminate,
    WorldBegan,
    begin,
    step,
)
from tests.doubles.machines import declared_steps_only

steps_are_declared = declared_steps_only(TRANSITIONS)

WORLD = World(1, ())
RESULT = Returned(b"42")
FAILURE = Failure("worker:0", "exception", "ValueError: no", 1.0)

READY = Ready(1)
BEGUN = Begun(1, WORLD)
RETURNING = Leaving(1, RESULT, 10.0 + EXIT_GRACE_S)
RAISING = Leaving(1, FAILURE, 10.0 + EXIT_GRACE_S)
KILLED = Leaving(1, RESULT, math.inf)
ENDING_IDLE = Ending("idle", 1, 13.0)
ENDING_ROUND = Ending("round", 2, 10.0)
ENDING_GONE = Ending("gone", 1, 13.0)
IDLE = Idle(1)
GONE = Gone()

BEGAN = WorldBegan(WORLD)
ENTERED = ChildEnteredMapFun()
RETURNED = ChildReportedEnd(RESULT)
RAISED = ChildReportedEnd(FAILURE)
EXITED = ChildExited(0)
SEGFAULTED = ChildExited(-11)
STOP_CHILD = ChildStopRequested(1, grace_s=3.0)
STOP_FAILED = ChildStopRequested(1, 3.0, "worker:0 raised ValueError")
STOP = StopRequested(grace_s=3.0)
ORPHANED = Orphaned("the executor is gone")
EXPIRED = DeadlinePassed()

ENDS: list[Action] = [CloseFeeds("the node ends"), Terminate()]
WHY = CloseFeeds("[SPARKDL-CLUSTER-FAILED] the cluster has failed: worker:0 raised ValueError")
ALL_FAILED: list[Action] = [WHY, Terminate()]
HAS_ENDED: list[Action] = [CloseFeeds("map_fun has ended")]
HAS_RAISED: list[Action] = [CloseFeeds(FAILURE.describe())]
HAS_EXITED: list[Action] = [CloseFeeds("the child has died (exit code 0)"), Kill()]
HAS_CRASHED: list[Action] = [CloseFeeds("the child has died (SIGSEGV)"), Kill()]
GOES: list[Action] = [
    Kill(),
    CloseFeeds("the executor is gone"),
    End("the executor is gone"),
]

STEPS: list[tuple[State, Event, State, list[Action]]] = [
    # Ready: a child waits for its world.
    (READY, BEGAN, BEGUN, [StartChild(WORLD)]),
    (READY, WorldBegan(World(0, ())), READY, []),
    (READY, WorldBegan(World(2, ())), READY, []),
    (READY, RETURNED, RETURNING, HAS_ENDED),
    (READY, RAISED, RAISING, HAS_RAISED),
    (READY, EXITED, IDLE, [*HAS_EXITED, ReportFailed(1, None, 0)]),
    (READY, SEGFAULTED, IDLE, [*HAS_CRASHED, ReportFailed(1, None, -11)]),
    (READY, RoundRequested(2), ENDING_ROUND, ENDS),
    (READY, RoundRequested(1), READY, []),
    (READY, RoundRequested(0), READY, []),
    (READY, STOP_CHILD, ENDING_IDLE, ENDS),
    (READY, ChildStopRequested(0, 3.0), READY, []),
    (READY, STOP_FAILED, ENDING_IDLE, ALL_FAILED),
    (READY, STOP, ENDING_GONE, ENDS),
    (READY, ORPHANED, GONE, GOES),
    # Begun: the child has its world.
    (BEGUN, BEGAN, BEGUN, []),
    (BEGUN, ENTERED, BEGUN, [ReportRunning(1)]),
    (BEGUN, RETURNED, RETURNING, HAS_ENDED),
    (BEGUN, RAISED, RAISING, HAS_RAISED),
    (BEGUN, EXITED, IDLE, [*HAS_EXITED, ReportFailed(1, None, 0)]),
    (BEGUN, RoundRequested(2), ENDING_ROUND, ENDS),
    (BEGUN, RoundRequested(1), BEGUN, []),
    (BEGUN, STOP_CHILD, ENDING_IDLE, ENDS),
    (BEGUN, ChildStopRequested(0, 3.0), BEGUN, []),
    (BEGUN, STOP_FAILED, ENDING_IDLE, ALL_FAILED),
    (BEGUN, STOP, ENDING_GONE, ENDS),
    (BEGUN, ORPHANED, GONE, GOES),
    # Leaving: the outcome is known, and told once the process has ended.
    (RETURNING, RAISED, RETURNING, []),
    (RETURNING, EXITED, IDLE, [Kill(), ReportReturned(1, RESULT)]),
    (RETURNING, SEGFAULTED, IDLE, [Kill(), ReportReturned(1, RESULT)]),
    (RAISING, ChildExited(1), IDLE, [Kill(), ReportFailed(1, FAILURE, None)]),
    (RETURNING, EXPIRED, KILLED, [Kill()]),
    (KILLED, ChildExited(-9), IDLE, [Kill(), ReportReturned(1, RESULT)]),
    (RETURNING, BEGAN, RETURNING, []),
    (RETURNING, RoundRequested(2), ENDING_ROUND, ENDS),
    (RETURNING, RoundRequested(1), RETURNING, []),
    (RETURNING, STOP_CHILD, ENDING_IDLE, ENDS),
    (RETURNING, ChildStopRequested(0, 3.0), RETURNING, []),
    (RETURNING, STOP, ENDING_GONE, ENDS),
    (RETURNING, ORPHANED, GONE, GOES),
    # Ending: the child was told to go; what follows may change, the time only shrinks.
    (ENDING_IDLE, EXITED, IDLE, [Kill()]),
    (ENDING_ROUND, EXITED, Ready(2), [Kill(), Spawn(2)]),
    (ENDING_GONE, EXITED, GONE, [Kill(), End("stopped")]),
    (ENDING_IDLE, EXPIRED, Ending("idle", 1, math.inf), [Kill()]),
    (ENDING_ROUND, EXPIRED, Ending("round", 2, math.inf), [Kill()]),
    (ENDING_GONE, EXPIRED, Ending("gone", 1, math.inf), [Kill()]),
    (ENDING_IDLE, RoundRequested(2), Ending("round", 2, 13.0), []),
    (ENDING_IDLE, RoundRequested(1), ENDING_IDLE, []),
    (ENDING_ROUND, RoundRequested(3), Ending("round", 3, 10.0), []),
    (ENDING_ROUND, RoundRequested(1), ENDING_ROUND, []),
    (ENDING_GONE, RoundRequested(2), ENDING_GONE, []),
    (ENDING_IDLE, STOP, ENDING_GONE, []),
    (ENDING_ROUND, STOP, Ending("gone", 2, 10.0), []),
    (Ending("idle", 1, 30.0), StopRequested(1.0), Ending("gone", 1, 11.0), []),
    (Ending("idle", 1, math.inf), STOP, ENDING_GONE, []),
    (ENDING_IDLE, STOP_CHILD, ENDING_IDLE, []),
    (ENDING_IDLE, BEGAN, ENDING_IDLE, []),
    (ENDING_IDLE, ENTERED, ENDING_IDLE, []),
    (ENDING_IDLE, RETURNED, ENDING_IDLE, []),
    (ENDING_IDLE, ORPHANED, GONE, GOES),
    # Idle: the log is still here.
    (IDLE, BEGAN, IDLE, []),
    (IDLE, RoundRequested(2), Ready(2), [Spawn(2)]),
    (IDLE, RoundRequested(1), IDLE, []),
    (IDLE, STOP_CHILD, IDLE, []),
    (IDLE, STOP_FAILED, IDLE, [WHY]),
    (IDLE, STOP, GONE, [End("stopped")]),
    (IDLE, ORPHANED, GONE, GOES),
    # Gone: nothing matters any more.
    (GONE, BEGAN, GONE, []),
    (GONE, ENTERED, GONE, []),
    (GONE, RETURNED, GONE, []),
    (GONE, EXITED, GONE, []),
    (GONE, RoundRequested(2), GONE, []),
    (GONE, STOP_CHILD, GONE, []),
    (GONE, STOP, GONE, []),
    (GONE, ORPHANED, GONE, []),
]
"""At 10 s: state, what happens, the state after, what is done."""


def name_of(row: tuple[State, Event, State, list[Action]]) -> str:
    before, event, after, _actions = row
    return f"{type(before).__name__}-{type(event).__name__}-{type(after).__name__}"


@pytest.mark.parametrize("row", STEPS, ids=name_of)
def test_step(row: tuple[State, Event, State, list[Action]]) -> None:
    before, event, after, actions = row
    assert step(before, event, 10.0) == (after, actions)


def test_an_agent_begins_with_a_child_for_generation_0() -> None:
    assert begin() == (Ready(0), [Spawn(0)])


def test_every_legal_pair_is_stepped_through() -> None:
    tried = {(type(before), type(event)) for before, event, _after, _actions in STEPS}
    assert tried == set(TRANSITIONS)


ONE_OF_EACH: dict[type, Any] = {
    type(one): one
    for one in (
        *(READY, BEGUN, RETURNING, ENDING_IDLE, IDLE, GONE, BEGAN, ENTERED, RETURNED, EXITED),
        *(RoundRequested(2), STOP_CHILD, STOP, ORPHANED, EXPIRED),
    )
}
ILLEGAL = [
    (state, event)
    for state in typing.get_args(State)
    for event in typing.get_args(Event)
    if (state, event) not in TRANSITIONS
]


def test_what_no_child_and_no_timer_does_is_illegal() -> None:
    no_deadline = {(state, DeadlinePassed) for state in (Ready, Begun, Idle, Gone)}
    no_child = {(Idle, event) for event in (ChildEnteredMapFun, ChildReportedEnd, ChildExited)}
    no_world_yet = {(Ready, ChildEnteredMapFun)}
    last_words_spoken = {(Leaving, ChildEnteredMapFun)}
    assert set(ILLEGAL) == no_deadline | no_child | no_world_yet | last_words_spoken


@pytest.mark.parametrize(("state", "event"), ILLEGAL)
def test_an_illegal_pair_raises_and_names_both(state: type, event: type) -> None:
    with pytest.raises(IllegalTransitionError, match=f"(?m)^{event.__name__} in {state.__name__}$"):
        step(ONE_OF_EACH[state], ONE_OF_EACH[event], 0.0)


def test_a_finished_node_does_another_round_with_a_new_child() -> None:
    state, actions = begin()
    story: list[Action] = [*actions]
    for event in (
        *(WorldBegan(World(0, ())), ENTERED, RETURNED, EXITED),
        *(RoundRequested(1), BEGAN, ENTERED, RAISED, ChildExited(1), STOP),
    ):
        state, actions = step(state, event, 10.0)
        story += actions
    assert state == GONE
    assert story == [
        *(Spawn(0), StartChild(World(0, ())), ReportRunning(0), *HAS_ENDED),
        *(Kill(), ReportReturned(0, RESULT)),
        *(Spawn(1), StartChild(WORLD), ReportRunning(1), *HAS_RAISED),
        *(Kill(), ReportFailed(1, FAILURE, None)),
        End("stopped"),
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

    def possible(self, state: State) -> list[Event]:
        """What can happen now: children and timers do only what they can, others anything."""
        generation = getattr(state, "generation", 0)
        events: list[Event] = [
            *(RoundRequested(g) for g in (generation - 1, generation, generation + 1)),
            *(WorldBegan(World(g, ())) for g in (generation, generation, generation + 1)),
            *(ChildStopRequested(g, 2.0) for g in (generation, generation + 1)),
            *(StopRequested(2.0), ORPHANED),
        ]
        if self.is_alive:
            events += [ChildExited(0), ChildExited(1), ChildExited(-9)]
            if not self.has_spoken:
                events += [RETURNED, RAISED] * 2
            if self.has_world and not self.is_in_map_fun and not self.has_spoken:
                events += [ENTERED] * 3
        if not math.isinf(state.deadline_s):
            events.append(EXPIRED)
        return events

    def happened(self, event: Event) -> None:
        if isinstance(event, ChildExited):
            self.is_alive = False
        elif isinstance(event, ChildEnteredMapFun):
            self.is_in_map_fun = True
        elif isinstance(event, ChildReportedEnd):
            self.has_spoken = True

    def did(self, action: Action) -> None:
        match action:
            case Spawn(generation):
                assert not self.is_alive, "one child at a time"
                assert not self.has_group, "the last child's group is dead"
                assert generation > max(self.spawned, default=-1), "each generation has one child"
                self.spawned.append(generation)
                self.is_alive = self.has_group = True
                self.has_world = self.is_in_map_fun = self.has_spoken = False
            case StartChild(world):
                assert not self.has_world, "one world for each child"
                assert world.generation == self.spawned[-1]
                self.has_world = True
            case ReportRunning(generation):
                assert self.is_in_map_fun
                assert generation == self.spawned[-1]
            case ReportReturned(generation) | ReportFailed(generation):
                assert not self.is_alive, "told when the child has ended"
                assert generation == self.spawned[-1]
                assert generation not in self.told, "told once"
                self.told.append(generation)
            case Terminate():
                assert self.is_alive
            case Kill():
                self.has_group = False
            case End():
                self.ends += 1

    def validate(self, before: State, state: State) -> None:
        assert self.ends == isinstance(state, Gone)
        assert not (isinstance(state, Gone) and self.has_group), "no child outlives its agent"
        if isinstance(before, Gone):
            assert state == before
        if isinstance(state, (Ready, Begun, Leaving, Ending)):
            assert self.is_alive, "each of these is about a child"
        if isinstance(state, Idle):
            assert not self.is_alive
            assert not self.has_group
        if not isinstance(state, Gone):
            assert state.generation >= getattr(before, "generation", 0), "generations only grow"
        if isinstance(state, Begun):
            assert self.has_world


@given(st.data())
def test_whatever_happens_the_node_stays_valid(data: st.DataObject) -> None:
    watcher = Watcher()
    state, actions = begin()
    for action in actions:
        watcher.did(action)
    for _ in range(data.draw(st.integers(0, 40))):
        # An end is always possible; that it is rare lets the others happen.
        is_end = data.draw(st.integers(0, 19)) == 19
        events = [
            e for e in watcher.possible(state) if isinstance(e, (StopRequested, Orphaned)) == is_end
        ]
        event = data.draw(st.sampled_from(events))
        watcher.now_s += 1.0
        watcher.happened(event)
        before, (state, actions) = state, step(state, event, watcher.now_s)
        for action in actions:
            watcher.did(action)
        watcher.validate(before, state)
