"""The life of a node as its agent sees it. Pure: no sockets, processes or clocks.

Runs in: agent

    Ready ──Begin──▶ Running ──returned──▶ Leaving ──exited──▶ Idle ──NewRound──▶ Ready
      │                │ └─────raised─────▶ Leaving                │
      │                └──exited──────────────────────────────────▶ (reported as failed)
      └──StopChild, NewRound, Stop──▶ Ending ──exited──▶ Idle | Ready | Ended

`step(state, event, now_s)` returns the next state and the actions that the agent has to perform.
Losing the coordinator or the owner (the Spark task or the executor) leads to `Ended` from
everywhere, the child killed on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from sparkdl.control.channel import Raised
from sparkdl.control.messages import ChildReturned
from sparkdl.core.failure import Code, status_in_words
from sparkdl.core.state_machine import stay, transition
from sparkdl.core.world import FIRST_TIME, Resume, World

Then = Literal["idle", "round", "gone"]

EXIT_GRACE_S = 10.0
"""How long a child may take to exit after `map_fun` has ended, before it is killed."""


@dataclass(frozen=True)
class Ready:
    """A child is up, importing its framework or waiting for the world: how an agent begins."""

    generation: int


@dataclass(frozen=True)
class Running:
    generation: int


@dataclass(frozen=True)
class Leaving:
    generation: int
    outcome: ChildReturned | Raised
    deadline_s: float


@dataclass(frozen=True)
class Ending:
    """The child was sent SIGTERM, and gets SIGKILL at the deadline; `then` says what follows."""

    then: Then
    generation: int
    deadline_s: float


@dataclass(frozen=True)
class Idle:
    generation: int


@dataclass(frozen=True)
class Ended:
    """The agent ends."""


State = Ready | Running | Leaving | Ending | Idle | Ended


@dataclass(frozen=True)
class WorldBegan:
    world: World
    resume: Resume = FIRST_TIME


@dataclass(frozen=True)
class ChildReportedEnd:
    outcome: ChildReturned | Raised


@dataclass(frozen=True)
class ChildExited:
    status: int


@dataclass(frozen=True)
class RoundRequested:
    generation: int


@dataclass(frozen=True)
class ChildStopRequested:
    generation: int
    grace_s: float
    reason: str = ""


@dataclass(frozen=True)
class StopRequested:
    grace_s: float


@dataclass(frozen=True)
class OwnerLost:
    reason: str


@dataclass(frozen=True)
class DeadlinePassed:
    """The state's deadline has passed."""


Event = (
    WorldBegan
    | ChildReportedEnd
    | ChildExited
    | RoundRequested
    | ChildStopRequested
    | StopRequested
    | OwnerLost
    | DeadlinePassed
)


@dataclass(frozen=True)
class Spawn:
    generation: int


@dataclass(frozen=True)
class StartChild:
    world: World
    resume: Resume = FIRST_TIME


@dataclass(frozen=True)
class Terminate:
    """Ask the child's process group to end (SIGTERM)."""


@dataclass(frozen=True)
class Kill:
    """End the child's process group (SIGKILL)."""


@dataclass(frozen=True)
class ReportEnd:
    generation: int
    outcome: ChildReturned | Raised | int


@dataclass(frozen=True)
class CloseFeeds:
    reason: str


Action = Spawn | StartChild | Terminate | Kill | ReportEnd | CloseFeeds
S = TypeVar("S", bound=State)
WithChild = TypeVar("WithChild", Ready, Running, Leaving)
Dying = TypeVar("Dying", Leaving, Ending)
Step = tuple[S, list[Action]]
"""The result of a handler: `Step[Idle | Ready]` where the next state is one of these."""


def step(state: State, event: Event, now_s: float) -> Step[State]:
    return transition(TRANSITIONS, state, event, now_s)


# A child waits for its world, trains, and reports how `map_fun` has ended.


def _ready_world(state: Ready, event: WorldBegan, now_s: float) -> Step[Ready | Running]:
    # A late message about another round.
    if event.world.generation != state.generation:
        return state, []
    return Running(state.generation), [StartChild(event.world, event.resume)]


def _reported_end(state: Ready | Running, event: ChildReportedEnd, now_s: float) -> Step[Leaving]:
    leaving = Leaving(state.generation, event.outcome, now_s + EXIT_GRACE_S)
    outcome = event.outcome
    # Feeders whose rows are refused show this text to the user.
    why = "map_fun has ended" if isinstance(outcome, ChildReturned) else outcome.failure.describe()
    return leaving, [CloseFeeds(why)]


def _exited_unreported(state: Ready | Running, event: ChildExited, now_s: float) -> Step[Idle]:
    report = ReportEnd(state.generation, event.status)
    how = status_in_words(event.status)
    # Kill is for the processes that the child has started and left in its group.
    return Idle(state.generation), [CloseFeeds(f"the child has died ({how})"), Kill(), report]


def _leaving_exited(state: Leaving, event: ChildExited, now_s: float) -> Step[Idle]:
    # The outcome counts, whatever the exit status: `map_fun` had ended before.
    return Idle(state.generation), [Kill(), ReportEnd(state.generation, state.outcome)]


def _expired(state: Dying, event: DeadlinePassed, now_s: float) -> Step[Dying]:
    # SIGKILL cannot be ignored, so the exit follows and no further deadline is needed.
    return replace(state, deadline_s=math.inf), [Kill()]


# A child is asked to end: for good, for another round, or with the agent.


def _end_child(
    then: Then, generation: int, grace_s: float, now_s: float, why: str = "the node ends"
) -> Step[Ending]:
    return Ending(then, generation, now_s + grace_s), [CloseFeeds(why), Terminate()]


def _child_stop(
    state: WithChild, event: ChildStopRequested, now_s: float
) -> Step[WithChild | Ending]:
    if event.generation != state.generation:
        return state, []
    why = _cluster_failed(event.reason) if event.reason else "the node ends"
    return _end_child("idle", state.generation, event.grace_s, now_s, why)


def _idle_child_stop(state: Idle, event: ChildStopRequested, now_s: float) -> Step[Idle]:
    return state, [CloseFeeds(_cluster_failed(event.reason))] if event.reason else []


def _cluster_failed(reason: str) -> str:
    return f"{Code.CLUSTER_FAILED} the cluster has failed: {reason}"


def _round(state: WithChild, event: RoundRequested, now_s: float) -> Step[WithChild | Ending]:
    if event.generation <= state.generation:
        return state, []
    # Without grace: all nodes wait for this one, and its work since the checkpoint is lost anyway.
    return _end_child("round", event.generation, 0.0, now_s)


def _idle_round(state: Idle, event: RoundRequested, now_s: float) -> Step[Idle | Ready]:
    if event.generation <= state.generation:
        return state, []
    return Ready(event.generation), [Spawn(event.generation)]


def _ending_round(state: Ending, event: RoundRequested, now_s: float) -> Step[Ending]:
    # A node that was asked to end never starts a child again.
    if state.then == "gone" or event.generation <= state.generation:
        return state, []
    return replace(state, then="round", generation=event.generation), []


def _stop(state: Ready | Running | Leaving, event: StopRequested, now_s: float) -> Step[Ending]:
    return _end_child("gone", state.generation, event.grace_s, now_s)


def _ending_stop(state: Ending, event: StopRequested, now_s: float) -> Step[Ending]:
    # A second request may shorten the time that the child has, and never extends it.
    return replace(state, then="gone", deadline_s=min(state.deadline_s, now_s + event.grace_s)), []


def _idle_stop(state: Idle, event: StopRequested, now_s: float) -> Step[Ended]:
    return Ended(), []


def _ending_exited(state: Ending, event: ChildExited, now_s: float) -> Step[Idle | Ready | Ended]:
    if state.then == "idle":
        return Idle(state.generation), [Kill()]
    if state.then == "round":
        return Ready(state.generation), [Kill(), Spawn(state.generation)]
    return Ended(), [Kill()]


def _owner_lost(state: State, event: OwnerLost, now_s: float) -> Step[Ended]:
    # First of all nothing trains any more: another host may be given the node's place.
    return Ended(), [Kill(), CloseFeeds(event.reason)]


_WITH_CHILD: dict[type, Callable[[Any, Any, float], Step[Any]]] = {
    RoundRequested: _round,
    ChildStopRequested: _child_stop,
    StopRequested: _stop,
}

TRANSITIONS: dict[tuple[type, type], Callable[[Any, Any, float], Step[State]]] = {
    **{(s, e): f for s in (Ready, Running, Leaving) for e, f in _WITH_CHILD.items()},
    **{(s, WorldBegan): stay for s in (Running, Leaving, Ending, Idle)},
    **{(s, OwnerLost): _owner_lost for s in (Ready, Running, Leaving, Ending, Idle)},
    (Ready, WorldBegan): _ready_world,
    (Ready, ChildReportedEnd): _reported_end,
    (Ready, ChildExited): _exited_unreported,
    (Running, ChildReportedEnd): _reported_end,
    (Running, ChildExited): _exited_unreported,
    (Leaving, ChildReportedEnd): stay,  # the first one counts
    (Leaving, ChildExited): _leaving_exited,
    (Leaving, DeadlinePassed): _expired,
    (Ending, ChildReportedEnd): stay,
    (Ending, ChildExited): _ending_exited,
    (Ending, RoundRequested): _ending_round,
    (Ending, ChildStopRequested): stay,
    (Ending, StopRequested): _ending_stop,
    (Ending, DeadlinePassed): _expired,
    (Idle, RoundRequested): _idle_round,
    (Idle, ChildStopRequested): _idle_child_stop,
    (Idle, StopRequested): _idle_stop,
}
"""Every legal pair of state and event; `stay`: the event is expected and means nothing.

Nothing is of interest once a node is `Ended`.
"""
