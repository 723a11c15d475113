"""The facts about a cluster, as its controller publishes them: see Events in docs/design.md.

Runs in: driver, dashboard

The events up to `Stacks` are also written to recorded runs and sent to the dashboard's process, one
JSON object a line. The others stay in the driver.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from sparkdl.control.messages import LogLines


class Event(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Something that has happened in a cluster.

    Attributes:
        cluster: its id.
        time_s: Unix time in seconds, by the driver's clock.
    """

    cluster: str
    time_s: float


class Launched(Event, frozen=True):
    """A cluster is being launched.

    Attributes:
        nodes: their names, by node id.
        is_fed: by this driver; otherwise its nodes read their own data.
    """

    framework: str
    nodes: tuple[str, ...]
    is_fed: bool = True


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a node of a generation runs."""

    node_id: int
    rank: int
    host: str


class Problem(msgspec.Struct, frozen=True):
    """Why a generation has ended.

    Attributes:
        node: its name, empty where it is not a node's.
        headline: a line.
        text: all of it: traceback, hint, last log lines.
    """

    node: str
    headline: str
    text: str = ""


class Changed(Event, frozen=True):
    """The cluster's state has changed.

    Attributes:
        state: `gathering`, `running`, `failing`, `finished`, `failed`, `stopping`, `stopped`.
        generation: -1 before the first.
        places: of a generation that begins.
        problems: the failures, the root cause first.
        reason: why there is another generation.
        status: the state in words, with the restarts; see `Cluster.status`.
        is_over: the cluster has ended, and its agents with it.
    """

    state: str
    generation: int = -1
    places: tuple[Place, ...] = ()
    problems: tuple[Problem, ...] = ()
    reason: str = ""
    status: str = ""
    is_over: bool = False


class Checkpoint(Event, frozen=True):
    """A checkpoint is complete."""

    url: str
    step: int


class FeedColumns(msgspec.Struct, frozen=True):
    """How far a feed is: lists by node id.

    Attributes:
        received: rows that have come.
        used: rows that user code was given.
        steps: batches that it was given.
        epochs: that are over.
        goal: rows that all nodes together will have used at the end of the current call; 0 without
            a call, or while unknown.
        stage: of the call that is being fed, empty if there is none: `computing`: none of its rows
            has come yet; `fed`: some have; `delivered`: all have, and the nodes read them.
    """

    received: list[int]
    used: list[int]
    steps: list[int]
    epochs: list[int]
    goal: int = 0
    stage: str = ""


class Sampled(Event, frozen=True):
    """The progress of the nodes, once a second: lists by node id.

    Attributes:
        states: what each node does, in a word or two.
        steps: that user code has reported, -1 for none.
        metrics: that it has reported with them, by name; None where a node has none.
        load: their use of CPU, memory and GPU, by name as in `NodeLoad`.
        feeds: by name.
        waits: shares of the last minute, by what a node waited for: `rows`, `others` (the other
            nodes); `lag`: how much longer the others waited, if they waited for this node. None if
            unknown.
    """

    states: list[str]
    pids: list[int]
    steps: list[int]
    metrics: dict[str, list[float | None]] = {}
    feeds: dict[str, FeedColumns] = {}
    load: dict[str, list[float]] = {}
    waits: dict[str, list[float | None]] = {}


class Printed(Event, frozen=True):
    """The last lines that a node has printed: the answer to `AskLog`."""

    node_id: int
    lines: tuple[str, ...]


class Stacks(Event, frozen=True):
    """The stacks of the nodes' threads, by node name: the answer to `AskStacks`."""

    stacks: dict[str, str]


class Report(Event, frozen=True):
    """A node's report by `ctx.report(step, **metrics)`.

    Attributes:
        time_s: Unix time in seconds at which the report came to the driver.
        node: its name, `worker:1` for example.
        rank: its rank in the world.
    """

    node: str
    rank: int
    step: int
    metrics: Mapping[str, float]


class Logged(Event, frozen=True):
    """A node's child has printed lines."""

    node: str
    printed: LogLines


class Stepped(Event, frozen=True):
    """The state or a feed's counts may have changed: subscribers look again."""


class Ended(Event, frozen=True):
    """The controller is closed: the last event of all."""


class AskLog(msgspec.Struct, frozen=True, tag=True):
    """A page asks for a node's log."""

    cluster: str
    node_id: int
    lines: int


class AskStacks(msgspec.Struct, frozen=True, tag=True):
    """A page asks for the threads' stacks."""

    cluster: str


SUFFIX = ".sparkdl.jsonl"
"""The suffix of recorded runs."""
AnyEvent = Launched | Changed | Checkpoint | Sampled | Printed | Stacks
Ask = AskLog | AskStacks
_events: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)
_asks: msgspec.json.Decoder[Ask] = msgspec.json.Decoder(Ask)
_encoder = msgspec.json.Encoder()


def line_of(message: Event | Ask) -> bytes:
    """Return a message as one line of JSON."""
    return _encoder.encode(message) + b"\n"


def event_of(line: bytes) -> AnyEvent:
    """Return the event of a line.

    Raises:
        msgspec.DecodeError: if it is none.
    """
    return _events.decode(line)


def ask_of(line: bytes) -> Ask:
    """Return the dashboard's question in a line.

    Raises:
        msgspec.DecodeError: if the line is no question.
    """
    return _asks.decode(line)
