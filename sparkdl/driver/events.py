"""The facts about a cluster, as its controller publishes them: see Events in docs/design.md.

Runs in: driver, dashboard

Events up to `Sampled` are also written to records, one JSON object a line; others stay here.
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
    """A cluster is being launched."""

    framework: str
    nodes: tuple[str, ...]


class Location(msgspec.Struct, frozen=True, array_like=True):
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
        locations: of a generation that begins.
        problems: the failures, the root cause first.
        reason: why there is another generation.
        status: the state in words, with the restarts; see `Cluster.status`.
        is_over: the cluster has ended, and its agents with it.
    """

    state: str
    generation: int = -1
    locations: tuple[Location, ...] = ()
    problems: tuple[Problem, ...] = ()
    reason: str = ""
    status: str = ""
    is_over: bool = False


class Checkpoint(Event, frozen=True):
    url: str
    step: int


class FeedColumns(msgspec.Struct, frozen=True):
    """How far a feed is: lists by node id.

    Attributes:
        received: rows that have come.
        used: rows that user code was given.
        steps: batches that it was given.
        epochs: that are over.
    """

    received: list[int]
    used: list[int]
    steps: list[int]
    epochs: list[int]


class Sampled(Event, frozen=True):
    """The progress of the nodes, once a second: lists by node id.

    Attributes:
        states: what each node does, in a word or two.
        steps: that user code has reported, -1 for none.
        metrics: that it has reported with them, by name; None where a node has none.
        load: their use of CPU, memory and GPU, by name as in `NodeLoad`.
        feeds: by name.
        waits: seconds of this generation by name, as in `NodeActive`: those that were `watched`,
            and of these the waits for `rows` and for `others`, the other nodes.
    """

    states: list[str]
    pids: list[int]
    steps: list[int]
    metrics: dict[str, list[float | None]] = {}
    feeds: dict[str, FeedColumns] = {}
    load: dict[str, list[float]] = {}
    waits: dict[str, list[float]] = {}


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
    node: str
    printed: LogLines


class Stepped(Event, frozen=True):
    """The state or a feed's counts may have changed: subscribers look again."""


class Ended(Event, frozen=True):
    """The controller is closed: the last event of all."""


SUFFIX = ".sparkdl.jsonl"
"""The suffix of recorded runs."""
AnyEvent = Launched | Changed | Checkpoint | Sampled
_events: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)
_encoder = msgspec.json.Encoder()


def line_of(event: Event) -> bytes:
    return _encoder.encode(event) + b"\n"


def event_of(line: bytes) -> AnyEvent:
    """Return the event of a line."""
    return _events.decode(line)
