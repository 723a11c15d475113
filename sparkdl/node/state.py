"""The life of a node as its agent sees it. Pure: no sockets, processes or clocks.

Runs in: agent

    Ready ──Begin──▶ Begun ──returned──▶ Leaving ──exited──▶ Idle ──NewRound──▶ Ready
      │                │ └────raised────▶ Leaving                │
      │                └──exited─────────────────────────────────▶ (reported as failed)
      └──StopChild, NewRound, Stop──▶ Ending ──exited──▶ Idle | Ready | Gone

`step(state, event, now_s)` returns the next state and the actions that the agent has to perform.
Losing the coordinator or the owner (the Spark task or the executor) leads to `Gone` from
everywhere, the child killed on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from sparkdl.control.channel import Returned
from sparkdl.core.checkpoint import FIRST_TIME, Resume
from sparkdl.core.errors import IllegalTransitionError
from sparkdl.core.failure import Failure, signal_name
from sparkdl.core.world import World
from sparkdl.feed.transfer.messages import CLUSTER_FAILED

Then = Literal["idle", "round", "gone"]

EXIT_GRACE_S = 10.0
"""How long a child may take to exit after `map_fun` has ended, before it is killed."""


@dataclass(frozen=True)
class Ready:
    """A child is up, importing its framework or waiting for the world."""

    generation: int
    deadline_s: float = math.inf


@dataclass(frozen=True)
class Begun:
    """The child has been given the world."""

    generation: int
    world: World
    deadline_s: float = math.inf


@dataclass(frozen=True)
class Leaving:
    """The child has said how `map_fun` ended, and is exiting."""

    generation: int
    outcome: Returned | Failure
    deadline_s: float


@dataclass(frozen=True)
class Ending:
    """The child was told to end (SIGTERM; after `deadline_s` SIGKILL); `then` says what follows."""

    then: Then
    generation: int
    deadline_s: float


@dataclass(frozen=True)
class Idle:
    """There is no child; its log is still here."""

    generation: int
    deadline_s: float = math.inf


@dataclass(frozen=True)
class Gone:
    """The agent ends."""

    deadline_s: float = math.inf


State = Ready | Begun | Leaving | Ending | Idle | Gone


@dataclass(frozen=True)
class WorldBegan:
    """The coordinator has begun a world, which goes on at `resume`."""

    world: World
    resume: Resume = FIRST_TIME


@dataclass(frozen=True)
class ChildEnteredMapFun:
    """The child says that it calls `map_fun` now."""


@dataclass(frozen=True)
class ChildSaidHowItEnded:
    """The child's last message."""

    outcome: Returned | Failure


@dataclass(frozen=True)
class ChildExited:
    """The child's process has ended; `status` is `Popen.returncode`."""

    status: int


@dataclass(frozen=True)
class RoundAsked:
    """The coordinator wants a new child for `generation`.

    Attributes:
        is_again: though there has been one already, which has ended.
    """

    generation: int
    is_again: bool = False


@dataclass(frozen=True)
class ChildStopAsked:
    """The coordinator wants the child of `generation` to end.

    Attributes:
        reason: the failure for which the cluster has failed for good, if that is why.
    """

    generation: int
    grace_s: float
    reason: str = ""


@dataclass(frozen=True)
class StopAsked:
    """The coordinator wants the node to end."""

    grace_s: float


@dataclass(frozen=True)
class Orphaned:
    """The coordinator or the owner is gone."""

    reason: str


@dataclass(frozen=True)
class DeadlinePassed:
    """The state's deadline has passed."""


Event = (
    WorldBegan
    | ChildEnteredMapFun
    | ChildSaidHowItEnded
    | ChildExited
    | RoundAsked
    | ChildStopAsked
    | StopAsked
    | Orphaned
    | DeadlinePassed
)


@dataclass(frozen=True)
class Spawn:
    """Start a child for `generation` and offer it, at the same port if it is `is_again`."""

    generation: int
    is_again: bool = False


@dataclass(frozen=True)
class StartChild:
    """Give the child its world."""

    world: World
    resume: Resume = FIRST_TIME


@dataclass(frozen=True)
class Terminate:
    """Ask the child's process group to end (SIGTERM)."""


@dataclass(frozen=True)
class Kill:
    """End the child's process group (SIGKILL)."""


@dataclass(frozen=True)
class TellRunning:
    """Tell the coordinator that `map_fun` has been entered."""

    generation: int


@dataclass(frozen=True)
class TellReturned:
    """Tell the coordinator the result."""

    generation: int
    returned: Returned


@dataclass(frozen=True)
class TellFailed:
    """Tell the coordinator of a failure: what the child said, or its exit status."""

    generation: int
    failure: Failure | None
    status: int | None


@dataclass(frozen=True)
class CloseFeeds:
    """Take no more rows."""

    reason: str


@dataclass(frozen=True)
class End:
    """End the agent."""

    reason: str


Action = (
    Spawn
    | StartChild
    | Terminate
    | Kill
    | TellRunning
    | TellReturned
    | TellFailed
    | CloseFeeds
    | End
)
Step = tuple[State, list[Action]]


def begin() -> Step:
    """Return the first state and what it wants done."""
    return Ready(0), [Spawn(0)]


def step(state: State, event: Event, now_s: float) -> Step:
    """Return the state after `event`, and what has to be done.

    Raises:
        IllegalTransitionError: if the state has no transition for the event.
    """
    handler = TRANSITIONS.get((type(state), type(event)))
    if handler is None:
        raise IllegalTransitionError(f"{type(event).__name__} in {type(state).__name__}")
    return handler(state, event, now_s)


def _stay(state: State, event: Event, now_s: float) -> Step:
    return state, []


def _ready_world(state: Ready, event: WorldBegan, now_s: float) -> Step:
    if event.world.generation != state.generation:
        return state, []
    return Begun(state.generation, event.world), [StartChild(event.world, event.resume)]


def _entered(state: Begun, event: ChildEnteredMapFun, now_s: float) -> Step:
    return state, [TellRunning(state.generation)]


def _said(state: Ready | Begun, event: ChildSaidHowItEnded, now_s: float) -> Step:
    leaving = Leaving(state.generation, event.outcome, now_s + EXIT_GRACE_S)
    outcome = event.outcome
    why = "map_fun has ended" if isinstance(outcome, Returned) else outcome.describe()
    return leaving, [CloseFeeds(why)]


def _exited_unsaid(state: Ready | Begun, event: ChildExited, now_s: float) -> Step:
    tell = TellFailed(state.generation, None, event.status)
    how = f"exit code {event.status}" if event.status >= 0 else signal_name(-event.status)
    return Idle(state.generation), [CloseFeeds(f"the child has died ({how})"), Kill(), tell]


def _leaving_exited(state: Leaving, event: ChildExited, now_s: float) -> Step:
    generation, outcome = state.generation, state.outcome
    tell: Action = (
        TellReturned(generation, outcome)
        if isinstance(outcome, Returned)
        else TellFailed(generation, outcome, None)
    )
    return Idle(generation), [Kill(), tell]


def _leaving_expired(state: Leaving, event: DeadlinePassed, now_s: float) -> Step:
    return replace(state, deadline_s=math.inf), [Kill()]


def _end_child(
    then: Then, generation: int, grace_s: float, now_s: float, why: str = "the node ends"
) -> Step:
    return Ending(then, generation, now_s + grace_s), [CloseFeeds(why), Terminate()]


def _child_stop(state: Ready | Begun | Leaving, event: ChildStopAsked, now_s: float) -> Step:
    if event.generation != state.generation:
        return state, []
    why = f"{CLUSTER_FAILED}: {event.reason}" if event.reason else "the node ends"
    return _end_child("idle", state.generation, event.grace_s, now_s, why)


def _idle_child_stop(state: Idle, event: ChildStopAsked, now_s: float) -> Step:
    return state, [CloseFeeds(f"{CLUSTER_FAILED}: {event.reason}")] if event.reason else []


def _round(state: Ready | Begun | Leaving, event: RoundAsked, now_s: float) -> Step:
    if event.generation <= state.generation:
        return state, []
    return _end_child("round", event.generation, 0.0, now_s)


def _idle_round(state: Idle, event: RoundAsked, now_s: float) -> Step:
    if event.is_again and event.generation == state.generation:
        return Ready(event.generation), [Spawn(event.generation, is_again=True)]
    if event.generation <= state.generation:
        return state, []
    return Ready(event.generation), [Spawn(event.generation)]


def _ending_round(state: Ending, event: RoundAsked, now_s: float) -> Step:
    if state.then == "gone" or event.generation <= state.generation:
        return state, []
    return replace(state, then="round", generation=event.generation), []


def _stop(state: Ready | Begun | Leaving, event: StopAsked, now_s: float) -> Step:
    return _end_child("gone", state.generation, event.grace_s, now_s)


def _ending_stop(state: Ending, event: StopAsked, now_s: float) -> Step:
    return replace(state, then="gone", deadline_s=min(state.deadline_s, now_s + event.grace_s)), []


def _idle_stop(state: Idle, event: StopAsked, now_s: float) -> Step:
    return Gone(), [End("stopped")]


def _ending_expired(state: Ending, event: DeadlinePassed, now_s: float) -> Step:
    return replace(state, deadline_s=math.inf), [Kill()]


def _ending_exited(state: Ending, event: ChildExited, now_s: float) -> Step:
    if state.then == "idle":
        return Idle(state.generation), [Kill()]
    if state.then == "round":
        return Ready(state.generation), [Kill(), Spawn(state.generation)]
    return Gone(), [Kill(), End("stopped")]


def _orphaned(state: State, event: Orphaned, now_s: float) -> Step:
    return Gone(), [CloseFeeds(event.reason), Kill(), End(event.reason)]


TRANSITIONS: dict[tuple[type, type], Callable[[Any, Any, float], Step]] = {
    (Ready, WorldBegan): _ready_world,
    (Ready, ChildSaidHowItEnded): _said,
    (Ready, ChildExited): _exited_unsaid,
    (Ready, RoundAsked): _round,
    (Ready, ChildStopAsked): _child_stop,
    (Ready, StopAsked): _stop,
    (Ready, Orphaned): _orphaned,
    (Begun, WorldBegan): _stay,
    (Begun, ChildEnteredMapFun): _entered,
    (Begun, ChildSaidHowItEnded): _said,
    (Begun, ChildExited): _exited_unsaid,
    (Begun, RoundAsked): _round,
    (Begun, ChildStopAsked): _child_stop,
    (Begun, StopAsked): _stop,
    (Begun, Orphaned): _orphaned,
    (Leaving, WorldBegan): _stay,
    (Leaving, ChildExited): _leaving_exited,
    (Leaving, RoundAsked): _round,
    (Leaving, ChildStopAsked): _child_stop,
    (Leaving, StopAsked): _stop,
    (Leaving, Orphaned): _orphaned,
    (Leaving, DeadlinePassed): _leaving_expired,
    (Ending, WorldBegan): _stay,
    (Ending, ChildEnteredMapFun): _stay,
    (Ending, ChildSaidHowItEnded): _stay,
    (Ending, ChildExited): _ending_exited,
    (Ending, RoundAsked): _ending_round,
    (Ending, ChildStopAsked): _stay,
    (Ending, StopAsked): _ending_stop,
    (Ending, Orphaned): _orphaned,
    (Ending, DeadlinePassed): _ending_expired,
    (Idle, WorldBegan): _stay,
    (Idle, RoundAsked): _idle_round,
    (Idle, ChildStopAsked): _idle_child_stop,
    (Idle, StopAsked): _idle_stop,
    (Idle, Orphaned): _orphaned,
    (Gone, WorldBegan): _stay,
    (Gone, ChildEnteredMapFun): _stay,
    (Gone, ChildSaidHowItEnded): _stay,
    (Gone, ChildExited): _stay,
    (Gone, RoundAsked): _stay,
    (Gone, ChildStopAsked): _stay,
    (Gone, StopAsked): _stay,
    (Gone, Orphaned): _stay,
}
"""Every legal pair of state and event; `_stay`: the event is expected and means nothing."""
