"""The life of a node's spare as its agent sees it. Pure: no processes, no clocks.

Runs in: agent

    Absent ──the child's first step, or 10 s──▶ Importing ──imported──▶ Waiting
      ▲                                             │                     │
      └────── the node wants a child: it is this ───┴─────────────────────┘

A spare that ends by itself, or for which there is no room, leads to `Off`: no other is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from sparkdl.core.state_machine import stay, transition

AFTER_S = 10.0
"""A `map_fun` that has run for so long trains, though neither feeds nor reports say so."""
HURRY_S = 20.0
"""How long the spare's import may wait for idle CPU time; on a busy host there may be none."""


@dataclass(frozen=True)
class Absent:
    """There is no spare; one is made when the child has taken a step, or at the deadline."""

    deadline_s: float = math.inf


@dataclass(frozen=True)
class Importing:
    """The spare has been started; from the deadline on it waits for idle CPU time no longer."""

    deadline_s: float = math.inf


@dataclass(frozen=True)
class Waiting:
    """The spare has imported everything, and waits to be used."""

    deadline_s: float = math.inf


@dataclass(frozen=True)
class Off:
    """There is no spare, and none is made any more."""

    deadline_s: float = math.inf


State = Absent | Importing | Waiting | Off


@dataclass(frozen=True)
class MapFunEntered:
    """The child calls `map_fun` now."""


@dataclass(frozen=True)
class StepTaken:
    """The child was given a batch, has reported a step, or has written a checkpoint."""


@dataclass(frozen=True)
class ChildEnded:
    """The child has ended; another may follow, or not."""


@dataclass(frozen=True)
class ChildWanted:
    """The node starts a child."""


@dataclass(frozen=True)
class SpareImported:
    """The spare has imported everything."""


@dataclass(frozen=True)
class SpareFailed:
    """The spare has ended by itself, or there is no room for it."""

    reason: str


@dataclass(frozen=True)
class NodeEnded:
    """The node needs no child any more."""


@dataclass(frozen=True)
class DeadlinePassed:
    """The state's deadline has passed."""


Event = (
    MapFunEntered
    | StepTaken
    | ChildEnded
    | ChildWanted
    | SpareImported
    | SpareFailed
    | NodeEnded
    | DeadlinePassed
)


@dataclass(frozen=True)
class StartSpare:
    """Start a spare, if there is room for one."""


@dataclass(frozen=True)
class HurrySpare:
    """Have the spare wait for idle CPU time no longer."""


@dataclass(frozen=True)
class UseSpare:
    """Make the spare the node's child."""


@dataclass(frozen=True)
class DropSpare:
    """End the spare."""


@dataclass(frozen=True)
class Tell:
    """Say why there is no spare any more."""

    reason: str


Action = StartSpare | HurrySpare | UseSpare | DropSpare | Tell
S = TypeVar("S", bound=State)
Step = tuple[S, list[Action]]


def begin(is_wanted: bool) -> State:
    """Return the first state."""
    return Absent() if is_wanted else Off()


def step(state: State, event: Event, now_s: float) -> Step[State]:
    """Return the state after `event`, and what has to be done.

    Raises:
        IllegalTransitionError: if the state has no transition for the event.
    """
    return transition(TRANSITIONS, state, event, now_s)


def _entered(state: Absent, event: MapFunEntered, now_s: float) -> Step[Absent]:
    return Absent(now_s + AFTER_S), []


def _start(state: Absent, event: StepTaken | DeadlinePassed, now_s: float) -> Step[Importing]:
    return Importing(now_s + HURRY_S), [StartSpare()]


def _hurry(state: Importing, event: DeadlinePassed, now_s: float) -> Step[Importing]:
    return Importing(), [HurrySpare()]


def _no_child(state: Absent, event: ChildEnded | ChildWanted, now_s: float) -> Step[Absent]:
    return Absent(), []


def _imported(state: Importing, event: SpareImported, now_s: float) -> Step[Waiting]:
    return Waiting(), []


def _use(state: Importing | Waiting, event: ChildWanted, now_s: float) -> Step[Absent]:
    return Absent(), [UseSpare()]


def _failed(state: Importing | Waiting, event: SpareFailed, now_s: float) -> Step[Off]:
    return Off(), [DropSpare(), Tell(event.reason)]


def _drop(state: Importing | Waiting, event: NodeEnded, now_s: float) -> Step[Off]:
    return Off(), [DropSpare()]


def _off(state: Absent, event: NodeEnded, now_s: float) -> Step[Off]:
    return Off(), []


TRANSITIONS: dict[tuple[type, type], Callable[[Any, Any, float], Step[State]]] = {
    (Absent, MapFunEntered): _entered,
    (Absent, StepTaken): _start,
    (Absent, ChildEnded): _no_child,
    (Absent, ChildWanted): _no_child,
    (Absent, NodeEnded): _off,
    (Absent, DeadlinePassed): _start,
    (Importing, StepTaken): stay,
    (Importing, ChildEnded): stay,
    (Importing, ChildWanted): _use,
    (Importing, SpareImported): _imported,
    (Importing, DeadlinePassed): _hurry,
    (Importing, SpareFailed): _failed,
    (Importing, NodeEnded): _drop,
    (Waiting, StepTaken): stay,
    (Waiting, ChildEnded): stay,
    (Waiting, ChildWanted): _use,
    (Waiting, SpareFailed): _failed,
    (Waiting, NodeEnded): _drop,
    (Off, MapFunEntered): stay,
    (Off, StepTaken): stay,
    (Off, ChildEnded): stay,
    (Off, ChildWanted): stay,
    (Off, NodeEnded): stay,
}
"""Every legal pair of state and event; `stay`: the event is expected and means nothing."""
