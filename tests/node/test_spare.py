"""A node's spare: what leads where, and what keeps it from being made."""

from __future__ import annotations

import asyncio
import math
import os
import select
import signal
import sys
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.control.channel import Consumed, Imported, Local, Reported, Running
from sparkdl.core.errors import IllegalTransitionError
from sparkdl.core.settings import Environment, Settings
from sparkdl.node import resources, spare_state
from sparkdl.node.spare import Children, lack_of_memory
from sparkdl.node.spare_state import (
    AFTER_S,
    HURRY_S,
    TRANSITIONS,
    Absent,
    Action,
    ChildEnded,
    ChildWanted,
    DeadlinePassed,
    DropSpare,
    Event,
    HurrySpare,
    Importing,
    MapFunEntered,
    NodeEnded,
    Off,
    SpareFailed,
    SpareImported,
    StartSpare,
    State,
    StepTaken,
    Tell,
    UseSpare,
    Waiting,
    begin,
    step,
)
from sparkdl.node.supervisor import Child, ChildSpec
from tests.doubles.machines import declared_steps_only
from tests.doubles.nodes import SOON_S

steps_are_declared = declared_steps_only(TRANSITIONS)

ABSENT, SOON, IMPORTING, WAITING, OFF = Absent(), Absent(20.0), Importing(), Waiting(), Off()
FAILED = SpareFailed("it crashed")
STEPS: list[tuple[State, Event, State, list[Action]]] = [
    (ABSENT, MapFunEntered(), Absent(10.0 + AFTER_S), []),
    (SOON, StepTaken(), Importing(10.0 + HURRY_S), [StartSpare()]),
    (SOON, DeadlinePassed(), Importing(10.0 + HURRY_S), [StartSpare()]),
    (SOON, ChildEnded(), ABSENT, []),
    (ABSENT, ChildWanted(), ABSENT, []),
    (SOON, NodeEnded(), OFF, []),
    (IMPORTING, SpareImported(), WAITING, []),
    (Importing(10.0), DeadlinePassed(), IMPORTING, [HurrySpare()]),
    (IMPORTING, ChildWanted(), ABSENT, [UseSpare()]),
    (IMPORTING, FAILED, OFF, [DropSpare(), Tell("it crashed")]),
    (IMPORTING, NodeEnded(), OFF, [DropSpare()]),
    (IMPORTING, ChildEnded(), IMPORTING, []),
    (IMPORTING, StepTaken(), IMPORTING, []),
    (WAITING, ChildWanted(), ABSENT, [UseSpare()]),
    (WAITING, FAILED, OFF, [DropSpare(), Tell("it crashed")]),
    (WAITING, NodeEnded(), OFF, [DropSpare()]),
    (WAITING, ChildEnded(), WAITING, []),
    (WAITING, StepTaken(), WAITING, []),
    (OFF, MapFunEntered(), OFF, []),
    (OFF, StepTaken(), OFF, []),
    (OFF, ChildEnded(), OFF, []),
    (OFF, ChildWanted(), OFF, []),
    (OFF, NodeEnded(), OFF, []),
]
"""At 10 s: state, what happens, the state after, what is done."""


@pytest.mark.parametrize(("before", "event", "after", "actions"), STEPS)
def test_step(before: State, event: Event, after: State, actions: list[Action]) -> None:
    assert step(before, event, 10.0) == (after, actions)


def test_every_legal_pair_is_stepped_through_and_others_raise() -> None:
    tried = {(type(before), type(event)) for before, event, _after, _actions in STEPS}
    assert tried == set(TRANSITIONS)
    with pytest.raises(IllegalTransitionError, match="SpareImported in Off"):
        step(OFF, SpareImported(), 0.0)


class Watcher:
    """A child and a spare as an agent's actions make them, and what holds of them."""

    def __init__(self) -> None:
        self.has_child = self.is_in_map_fun = self.has_spare = self.has_imported = False
        self.has_ended = False

    def possible(self, state: State) -> list[Event]:
        events: list[Event] = [NodeEnded()]
        if not self.has_child:
            return [*events, ChildWanted()]
        events += [ChildEnded()] + [StepTaken()] * self.is_in_map_fun
        events += [MapFunEntered()] * (not self.is_in_map_fun)
        if self.has_spare:
            events += [FAILED] + [SpareImported()] * (not self.has_imported)
        if not math.isinf(state.deadline_s):
            events.append(DeadlinePassed())
        return events

    def happened(self, event: Event) -> None:
        match event:
            case ChildWanted():
                self.has_child = True
            case ChildEnded():
                self.has_child = self.is_in_map_fun = False
            case MapFunEntered():
                self.is_in_map_fun = True
            case SpareImported():
                self.has_imported = True
            case NodeEnded():
                self.has_ended = True

    def did(self, action: Action) -> None:
        match action:
            case StartSpare():
                assert self.is_in_map_fun, "it must not slow the launch down"
                assert not self.has_spare, "one at a time"
                assert not self.has_ended
                self.has_spare, self.has_imported = True, False
            case HurrySpare():
                assert self.has_spare
                assert not self.has_imported
            case UseSpare() | DropSpare():
                assert self.has_spare
                self.has_spare = False


@given(st.data(), st.booleans())
def test_whatever_happens_there_is_one_spare_at_most_and_none_in_the_end(
    data: st.DataObject, is_wanted: bool
) -> None:
    watcher, state, now_s = Watcher(), begin(is_wanted), 0.0
    for event in [ChildWanted(), *([None] * data.draw(st.integers(0, 30))), NodeEnded()]:
        chosen = event or data.draw(st.sampled_from(watcher.possible(state)))
        now_s += 1.0
        watcher.happened(chosen)
        state, actions = step(state, chosen, now_s)
        for action in actions:
            watcher.did(action)
        assert watcher.has_spare == isinstance(state, Importing | Waiting)
        assert is_wanted or isinstance(state, Off)
    assert not watcher.has_spare


# Performed, with real processes.

MIB = 1 << 20
RESTARTS = Settings(max_restarts=1)
Story = Callable[[Children, Child], Awaitable[None]]


def play(
    story: Story, settings: Settings = RESTARTS, environment: Environment | None = None
) -> list[str]:
    """Have `story` be an agent with a child; return what was said, once all have ended."""
    said: list[str] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        children = Children(
            loop,
            ChildSpec("plain", {}),
            settings,
            environment or Environment(),
            said.append,
        )
        ended: asyncio.Future[int] = loop.create_future()
        child, pipe = children.take(
            lambda message, fd: children.note(message, child), ended.set_result
        )
        try:
            await asyncio.wait_for(story(children, child), SOON_S)
        finally:
            await children.close()
            child.signal_group(signal.SIGKILL)
            await asyncio.wait_for(ended, SOON_S)
            pipe.close()
            child.close()

    asyncio.run(run())
    return said


def spare_of(children: Children) -> Child | None:
    return children._spare.child if children._spare else None


async def until(is_true: Callable[[], Any]) -> None:
    while not is_true():
        await asyncio.sleep(0.01)


def tight(monkeypatch: pytest.MonkeyPatch, free: int, total: int = 800 * MIB) -> None:
    memory = SimpleNamespace(available=free, total=total)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(resources, "cgroup_limit", lambda: None)


@pytest.mark.parametrize("message", [Consumed("input", 1, 0, 1), Reported(7)])
def test_spare_is_made_at_the_first_step_and_waits_until_it_is_taken(message: Local) -> None:
    async def story(children: Children, child: Child) -> None:
        children.note(Running(), child)
        children.note(Consumed("input", 0, 0), child)  # it waits for rows
        assert spare_of(children) is None
        children.note(message, child)
        spare = spare_of(children)
        assert spare is not None
        assert spare.pid != child.pid
        await until(lambda: isinstance(children._state, Waiting))
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        taken, pipe = children.take(lambda message, fd: None, ended.set_result)
        assert taken is spare
        assert spare_of(children) is None
        taken.signal_group(signal.SIGTERM)
        assert await ended == -signal.SIGTERM, "its end is told to who took it"
        pipe.close()
        taken.close()

    assert play(story) == []


def test_program_that_neither_reads_nor_reports_gets_its_spare_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(children: Children, child: Child) -> None:
        children.note(Running(), child)
        await until(lambda: spare_of(children))

    monkeypatch.setattr(spare_state, "AFTER_S", 0.1)
    assert play(story) == []


@pytest.mark.skipif(sys.platform != "linux", reason="standing back is Linux's")
def test_spare_that_finds_no_idle_time_imports_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(children: Children, child: Child) -> None:
        children.note(Reported(1), child)
        spare = spare_of(children)
        assert spare is not None
        os.kill(spare.pid, signal.SIGSTOP)  # as if there were none
        await until(lambda: os.sched_getscheduler(spare.pid) == os.SCHED_BATCH)
        os.kill(spare.pid, signal.SIGCONT)

    monkeypatch.setattr(spare_state, "HURRY_S", 0.1)
    assert play(story) == []


def test_spare_that_has_just_been_killed_is_not_taken() -> None:
    async def story(children: Children, child: Child) -> None:
        children.note(Reported(1), child)
        spare = spare_of(children)
        assert spare is not None
        os.kill(spare.pid, signal.SIGKILL)
        os.waitid(os.P_PID, spare.pid, os.WEXITED | os.WNOWAIT)
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        taken, pipe = children.take(lambda message, fd: None, ended.set_result)
        assert taken.pid != spare.pid
        taken.signal_group(signal.SIGKILL)
        await ended
        pipe.close()
        taken.close()

    (told,) = play(story)
    assert told.endswith("it was ended by SIGKILL")


def test_no_spare_where_it_would_take_the_memory_that_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(children: Children, child: Child) -> None:
        children.note(Imported(), child)
        children.note(Reported(1), child)
        assert spare_of(children) is None

    tight(monkeypatch, free=99 * MIB)
    (told,) = play(story)
    assert "99 MB are free, of which 100 MB are to stay free" in told


def test_spare_that_the_system_cannot_start_is_no_error_of_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(children: Children, child: Child) -> None:
        monkeypatch.setattr(sys, "executable", "/there/is/no/python")
        children.note(Reported(1), child)
        assert spare_of(children) is None

    (told,) = play(story)
    assert "No such file or directory: '/there/is/no/python'" in told


def test_what_is_free_beyond_an_eighth_of_all_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    tight(monkeypatch, free=150 * MIB)
    assert lack_of_memory(50 * MIB) == ""
    assert "it would take 51 MB" in lack_of_memory(51 * MIB)


def test_last_words_of_a_spare_that_is_dropped_reach_nobody() -> None:
    async def story(children: Children, child: Child) -> None:
        children.note(Reported(1), child)
        spare = spare_of(children)
        assert spare is not None
        assert select.select([spare.sock], [], [], SOON_S)[0], "that it has imported"
        children.end()

    assert play(story) == []


def test_no_spare_where_there_are_no_restarts() -> None:
    async def story(children: Children, child: Child) -> None:
        children.note(Reported(1), child)
        assert spare_of(children) is None

    assert play(story, Settings()) == []


@pytest.mark.parametrize(("asked", "is_made"), [(None, False), (True, True)])
def test_container_of_yarn_whose_memory_nobody_tells_gets_one_if_asked(
    asked: bool | None, is_made: bool
) -> None:
    async def story(children: Children, child: Child) -> None:
        children.note(Reported(1), child)
        assert (spare_of(children) is not None) == is_made

    told = play(story, Settings(max_restarts=1, spare=asked), Environment(is_yarn=True))
    assert ["YARN" in line for line in told] == [True] * (not is_made)
