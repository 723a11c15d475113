"""The states of a feed, its events, and its actions. Pure data.

One feed is in one state at a time. `driver/feeds/transitions.py` holds the table of transitions,
`driver/feeds/runner.py` makes the events and performs the actions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, TypeVar

from sparkdl.control.messages import Granted, Spooled, ToAgent
from sparkdl.control.rows import FeedCount
from sparkdl.core.errors import SparkdlError
from sparkdl.core.world import Member, World
from sparkdl.driver.feeds.coverage import Call, CallHistory, EpochLeft, FeedRequest
from sparkdl.driver.feeds.fixed_order import OrderedTable
from sparkdl.driver.feeds.table import RowTable
from sparkdl.feed.transfer.messages import FedPartition, FeedSpec

# the data of a feed


@dataclass(frozen=True)
class Nodes:
    """The driver's knowledge of the nodes at one moment, for one feed.

    Attributes:
        generation: of the current or next world; `None` after the end.
        world: the current nodes; `None` while a new world gathers.
        problem: why the cluster cannot be fed any more: a failure (`has_failed`), or its shutdown.
        finished: nodes that have returned or failed for good.
        progress: counts the changes of all feeds: a larger number means that rows have moved.
    """

    generation: int | None = None
    world: World | None = None
    problem: SparkdlError | None = None
    has_failed: bool = False
    has_finished: bool = False
    finished: frozenset[int] = frozenset()
    counts: Mapping[int, FeedCount] = field(default_factory=dict)
    progress: int = 0

    def counts_of(self, node_ids: Iterable[int]) -> dict[int, FeedCount]:
        return {node_id: self.counts.get(node_id, FeedCount("")) for node_id in sorted(node_ids)}

    def inactive(self, node_ids: Iterable[int]) -> frozenset[int]:
        """Return the nodes that take no more rows; none while the next world is undecided."""
        if self.world is None:
            return frozenset()
        if self.has_finished:
            return frozenset(node_ids)  # the others are stopped
        counts = self.counts_of(node_ids)
        return frozenset(n for n, count in counts.items() if count.closed or n in self.finished)

    def active(self, node_ids: Iterable[int]) -> dict[int, FeedCount]:
        inactive = self.inactive(node_ids)
        return {n: count for n, count in self.counts_of(node_ids).items() if n not in inactive}


@dataclass(frozen=True)
class QueuedCall:
    """A `feed` call waits for its rows to be read."""

    ticket: int
    request: FeedRequest
    call: Call | None = None


@dataclass(frozen=True)
class Feed:
    """The part of a feed that all its states have.

    Attributes:
        answer_s: how long nodes may take to answer; a frozen agent counts as lost before.
    """

    history: CallHistory
    spec: FeedSpec
    answer_s: float
    nodes: Nodes = Nodes()
    requests: tuple[QueuedCall, ...] = ()
    last_job: int = 0

    @property
    def name(self) -> str:
        return self.spec.feed


@dataclass(frozen=True)
class Run:
    """One generation is being fed the remaining rows of a call.

    Attributes:
        left: the epochs with rows to feed; `first` is the number of the first of them.
        start_counts: the nodes' counts when it began.
        covered: rows of the call that a checkpoint covered when it began.
        last_epoch_to_read: the last epoch that all nodes will surely read.
        rows_due: rows brought, by node id.
        table: the rows of `epoch` from feeders. It changes in place.
        carried: rows of `epoch` by node id that nodes have before it is fed.
        sent: rows from feeders by node id; each once, however often it is read.
        is_unwanted: user code of a node has ended the call, or no node is left.
        progress, quiet_s: the last change of all feeds, and when the feed timeout is over.
    """

    call: Call
    left: tuple[EpochLeft, ...]
    first: int
    spec: FeedSpec
    members: tuple[Member, ...]
    start_counts: Mapping[int, FeedCount]
    covered: int
    epoch: int
    progress: int
    quiet_s: float
    table: RowTable = field(default_factory=lambda: RowTable({}, {}), compare=False)
    last_epoch_to_read: int = -1
    rows_due: Mapping[int, int] = field(default_factory=dict)
    refused: int = 0
    passes: int = 0
    carried: Mapping[int, int] = field(default_factory=dict)
    sent: Mapping[int, int] = field(default_factory=dict)
    is_unwanted: bool = False
    granted: Granted | None = None

    @property
    def last(self) -> int:
        return self.first + len(self.left) - 1

    @property
    def rows(self) -> int:
        """The number of rows to read; 0 while unknown."""
        return self.call.rows_of(self.left)

    @property
    def is_shuffled(self) -> bool:
        return self.call.request.shuffle is not None

    @property
    def now(self) -> EpochLeft:
        return self.left[self.epoch - self.first]

    def with_table(self) -> Run:
        random, sent = None, added(self.sent, self.table.assigned)
        batch_rows, done = self.spec.global_batch_size, self.now.done
        if batch_rows is None:
            random = Random() if self.is_shuffled else None
            return replace(self, table=RowTable(self.carried, done, random), sent=sent)
        if self.is_shuffled:
            # Python seeds by a text's SHA-512, so every run gets the same order.
            key = f"{self.call.request.seed}/{self.call.number}/{self.now.epoch}"
            random = Random(key)
        nodes = [member.node.node_id for member in self.members]
        table = OrderedTable(nodes, batch_rows, self.call.shape.rows, done, random)
        return replace(self, table=table, sent=sent)

    @property
    def node_ids(self) -> frozenset[int]:
        return frozenset(member.node.node_id for member in self.members)


# states


@dataclass(frozen=True)
class Idle:
    """There is nothing to feed, or no world to feed it to.

    Attributes:
        generation: the last generation that has been fed completely.
    """

    feed: Feed
    generation: int = -1
    deadline_s: float = math.inf


@dataclass(frozen=True)
class _OfRun:
    """A state in which a feed serves a run."""

    feed: Feed
    run: Run
    deadline_s: float
    error: Exception | None = None


class Opening(_OfRun):
    """The agents report which rows they still have from the generation before."""


@dataclass(frozen=True)
class Delivering(_OfRun):
    """A Spark job brings the rows of one epoch; behind an error, a node may be about to say why.

    Attributes:
        job: the number of the Spark job while it runs; 0 otherwise.
        num_rows: by partition, once the job has ended.
    """

    job: int = 0
    num_rows: Mapping[int, int] = field(default_factory=dict)


class Cutting(_OfRun):
    """All rows of an epoch are assigned; nodes fetch and count them."""


class Reading(_OfRun):
    """The nodes read the rows of all epochs, or of one epoch before the next shuffle."""


class CuttingShort(_OfRun):
    """The call ends within an epoch: the nodes count their rows of it."""


Running = Opening | Delivering | Cutting | Reading | CuttingShort
State = Idle | Running


# events


@dataclass(frozen=True)
class NodesSeen:
    nodes: Nodes


@dataclass(frozen=True)
class RowsSpooled:
    reports: tuple[tuple[int, Spooled], ...]


@dataclass(frozen=True)
class Requested:
    request: QueuedCall


@dataclass(frozen=True)
class Withdrawn:
    """The caller does not want a request any more."""

    ticket: int


@dataclass(frozen=True)
class JobEnded:
    job: int
    fed: tuple[FedPartition, ...]


@dataclass(frozen=True)
class JobFailed:
    """The Spark job has failed. For `reason_s` a failure of a node may come that explains it."""

    job: int
    error: Exception
    reason_s: float = 0.0


@dataclass(frozen=True)
class DeadlinePassed:
    """The state's deadline has passed."""


Event = NodesSeen | RowsSpooled | Requested | Withdrawn | JobEnded | JobFailed | DeadlinePassed


# actions


@dataclass(frozen=True)
class Send:
    message: ToAgent
    node_ids: frozenset[int]
    generation: int


@dataclass(frozen=True)
class StartJob:
    """Feed `data` by Spark; the thread of the call `ticket` runs the job, if one waits."""

    job: int
    data: Any
    spec: FeedSpec
    ticket: int | None


@dataclass(frozen=True)
class CancelJob:
    """Cancel a job until it has ended; nobody waits for that, but the feed's next job does."""

    job: int


@dataclass(frozen=True)
class Answer:
    """Answer the request of `ticket`: with a report, or an error to raise."""

    ticket: int
    value: Any


@dataclass(frozen=True)
class KeepProblem:
    """Feeding rows again in the background failed; raise the error at the next call."""

    error: Exception


@dataclass(frozen=True)
class Warn:
    text: str


Action = Send | StartJob | CancelJob | Answer | KeepProblem | Warn
S = TypeVar("S", bound=State)
R = TypeVar("R", bound=Running)
W = TypeVar("W", Delivering, Cutting, Reading)
Step = tuple[S, list[Action]]
"""The return type of handlers: `Step[Cutting | Idle]` if the next state is one of these."""


def wakes_s(state: State) -> float:
    """Return when to look at a feed again without an event."""
    if isinstance(state, Delivering) and state.error is None:
        return min(state.deadline_s, state.run.table.due_s)
    return state.deadline_s


def with_feed(state: S, **changes: Any) -> S:
    return replace(state, feed=replace(state.feed, **changes))


def with_run(state: R, **changes: Any) -> R:
    return replace(state, run=replace(state.run, **changes))


def added(*rows: Mapping[Any, int]) -> dict[Any, int]:
    total: Counter[Any] = Counter()
    for each in rows:
        total.update(each)
    return dict(total)
