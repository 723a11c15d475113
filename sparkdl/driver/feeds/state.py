"""What a feed can be doing, what can happen to it, and what is then to be done. Pure data.

Runs in: driver

One feed is in one state at a time. `driver/feeds/transitions.py` holds the table of transitions,
`driver/feeds/runner.py` turns what happens into events and performs the actions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, TypeVar

from sparkdl.control.messages import FeedCount, Granted, Spooled, ToAgent
from sparkdl.core.errors import SparkdlError
from sparkdl.core.world import Member, World
from sparkdl.driver.feeds.coverage import Call, CallHistory, EpochLeft, FeedRequest
from sparkdl.driver.feeds.table import RowTable
from sparkdl.feed.transfer.messages import FedPartition, FeedSpec

# what a feed knows


@dataclass(frozen=True)
class Nodes:
    """What the driver knows of the nodes at one moment, as far as it concerns one feed.

    Attributes:
        generation: of the world that there is, or is about to be; `None` after the end.
        world: the nodes that there are; `None` while others are awaited.
        problem: why the cluster cannot be fed any more.
        has_failed: `problem` is a failure of the cluster, not its shutdown.
        has_finished: all nodes that finish the job have returned.
        over: nodes that have returned, or that the others continue without.
        counts: what each node has received and read, by node id.
        progress: counts the news of all feeds: a larger number means that rows have moved.
    """

    generation: int | None = None
    world: World | None = None
    problem: SparkdlError | None = None
    has_failed: bool = False
    has_finished: bool = False
    over: frozenset[int] = frozenset()
    counts: Mapping[int, FeedCount] = field(default_factory=dict)
    progress: int = 0

    def counts_of(self, node_ids: Iterable[int]) -> dict[int, FeedCount]:
        """Return what each of these nodes has received and read."""
        return {node_id: self.counts.get(node_id, FeedCount("")) for node_id in sorted(node_ids)}

    def gone(self, node_ids: Iterable[int]) -> frozenset[int]:
        """Return those that take no more rows, ever; none while what follows is undecided."""
        if self.world is None:
            return frozenset()
        if self.has_finished:
            return frozenset(node_ids)  # those that have not returned are stopped
        counts = self.counts_of(node_ids)
        return frozenset(n for n, count in counts.items() if count.closed or n in self.over)

    def stopped(self, members: Iterable[Member]) -> frozenset[int]:
        """Return those that are stopped because all nodes that finish the job have returned."""
        ids = (m.node.node_id for m in members if not m.role.finishes_job)
        return frozenset(ids) - self.over if self.has_finished else frozenset()

    def staying(self, node_ids: Iterable[int]) -> dict[int, FeedCount]:
        """Return what those that take more rows have received and read."""
        gone = self.gone(node_ids)
        return {n: count for n, count in self.counts_of(node_ids).items() if n not in gone}


@dataclass(frozen=True)
class Stream:
    """A stream of micro-batches.

    Attributes:
        generation, epoch: the first epoch of the stream in the generation that opened it.
        is_stopped: there will be no more micro-batches.
        brought: rows by node name, by generation.
    """

    generation: int
    epoch: int
    is_stopped: bool = False
    brought: Mapping[int, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class FeedAsked:
    """A `feed` call waits for its rows to be read.

    Attributes:
        call: its entry in the history, once its turn has come.
    """

    ticket: int
    request: FeedRequest
    call: Call | None = None


@dataclass(frozen=True)
class StreamAsked:
    """A stream is to be opened."""

    ticket: int
    to: str | None


@dataclass(frozen=True)
class StreamEndAsked:
    """The nodes are to be told that the stream has ended."""

    ticket: int
    to: str | None


Request = FeedAsked | StreamAsked | StreamEndAsked


@dataclass(frozen=True)
class Feed:
    """What is known of a feed whatever it is doing.

    Attributes:
        history: its calls, and which of their rows a checkpoint covers.
        spec: what holds for every call: the token, the feed timeout where a call names none.
        reason_s: how long to wait for what explains that feeders have lost a node.
        answer_s: how long nodes may take to say what they have of an epoch, or which one they read:
            longer than an agent may be silent, so that one that stands still is lost, not blamed.
        requests: those that wait, in order. The first `FeedAsked` may be under way.
        last_job: the number of the Spark job that was started last.
    """

    history: CallHistory
    spec: FeedSpec
    reason_s: float
    answer_s: float
    nodes: Nodes = Nodes()
    requests: tuple[Request, ...] = ()
    stream: Stream | None = None
    last_job: int = 0

    @property
    def name(self) -> str:
        """The feed's name."""
        return self.spec.feed


@dataclass(frozen=True)
class Run:
    """One generation is being fed what a call has left.

    Attributes:
        left: the epochs of which there are rows to feed.
        first: the number of the first of them.
        spec: the instructions of feeders.
        members: the nodes that are fed.
        before: their counts when it began.
        covered: rows of the call that a checkpoint covered when it began.
        brought_before: rows by node id that the stream has brought, whose micro-batch this is.
        epoch: the one that is being fed, or is to be next.
        read_to: the last one that all nodes are sure to read.
        expected: rows by node id that the nodes have been brought.
        refused: rows that no node wanted.
        passes: how often the data has been read.
        table: where the rows of `epoch` are that feeders bring. It changes in place.
        ahead: rows by node id that some nodes have of `epoch` before it is fed.
        sent: rows by node id that feeders have brought for it; each once, however often it is read.
        moved: rows of which another node's agent had to send them on.
        repeated: the epoch that is read from the logs more than once, and the rows by node id.
        is_unwanted: user code of a node has ended the call, or no node is left.
        counts_until_s: until then rows are counted that no node is left to read.
        is_cut: some of them were not counted.
        granted: what the nodes were granted last.
        progress, quiet_s: the last news of all feeds, and when the feed timeout is over.
    """

    call: Call
    left: tuple[EpochLeft, ...]
    first: int
    spec: FeedSpec
    members: tuple[Member, ...]
    before: Mapping[int, FeedCount]
    covered: int
    brought_before: Mapping[int, int]
    epoch: int
    progress: int
    quiet_s: float
    table: RowTable = field(default_factory=lambda: RowTable({}, {}), compare=False)
    read_to: int = -1
    expected: Mapping[int, int] = field(default_factory=dict)
    refused: int = 0
    passes: int = 0
    ahead: Mapping[int, int] = field(default_factory=dict)
    sent: Mapping[int, int] = field(default_factory=dict)
    moved: int = 0
    repeated: tuple[int, Mapping[int, int]] | None = None
    is_unwanted: bool = False
    counts_until_s: float = -math.inf
    is_cut: bool = False
    granted: Granted | None = None

    @property
    def last(self) -> int:
        """The number of the last epoch."""
        return self.first + len(self.left) - 1

    @property
    def rows(self) -> int:
        """How many rows there are to read; 0 if that is not known yet."""
        return self.call.rows_of(self.left)

    @property
    def is_micro_batch(self) -> bool:
        """Whether the nodes read what this call feeds, and what the next one does, as one."""
        return self.call.request.is_micro_batch

    @property
    def is_shuffled(self) -> bool:
        """Whether each epoch is dealt anew over all nodes."""
        return self.call.request.shuffle is not None

    @property
    def now(self) -> EpochLeft:
        """What is left of `epoch`."""
        return self.left[self.epoch - self.first]

    def with_table(self) -> Run:
        """Return the run with an empty table for what is left of its epoch."""
        return replace(
            self,
            table=RowTable(self.ahead, self.now.done, Random() if self.is_shuffled else None),
            sent=added(self.sent, self.table.assigned),
            moved=self.moved + self.table.rows_moved,
        )

    @property
    def node_ids(self) -> frozenset[int]:
        """The nodes that are fed."""
        return frozenset(member.node.node_id for member in self.members)

    def name_of(self, node_id: int) -> str:
        """Return the name of a node that is fed."""
        return next(m.node.name for m in self.members if m.node.node_id == node_id)


# what a feed can be doing


@dataclass(frozen=True)
class Idle:
    """Nothing is to be fed, or it is not known to which nodes.

    Attributes:
        generation: the last one that has been fed all that it is to have.
    """

    feed: Feed
    generation: int = -1
    deadline_s: float = math.inf


@dataclass(frozen=True)
class _OfRun:
    """What a feed does for a run.

    Attributes:
        error: what the call ends with, if that is an error.
    """

    feed: Feed
    run: Run
    deadline_s: float
    error: Exception | None = None


class Opening(_OfRun):
    """The agents report which rows they still have from the generation before."""


@dataclass(frozen=True)
class _Watched(_OfRun):
    """Rows are to move within the feed timeout.

    Attributes:
        blamed: a node that stands still, whose last log lines are awaited until the deadline.
    """

    blamed: int | None = None

    @property
    def is_watched(self) -> bool:
        """Whether the deadline is that of the feed timeout."""
        return self.blamed is None


@dataclass(frozen=True)
class Delivering(_Watched):
    """A Spark job brings the rows of one epoch; what it ends with waits for its end.

    Attributes:
        job: the number of the Spark job; 0 where none is needed.
        num_rows: by partition, once the job has ended.
        gives_up_s: when a job that is to end is not waited for any more.
    """

    job: int = 0
    num_rows: Mapping[int, int] | None = None
    gives_up_s: float = math.inf

    @property
    def is_job_running(self) -> bool:
        """Whether a Spark job runs."""
        return self.num_rows is None

    @property
    def is_cancelled(self) -> bool:
        """Whether the job has been told to end."""
        return self.gives_up_s < math.inf

    @property
    def is_watched(self) -> bool:
        """Whether the deadline is that of the feed timeout."""
        return not self.is_cancelled and super().is_watched


class Explaining(_OfRun):
    """The job has failed, or rows were refused (no error); a node may be about to say why."""


class Cutting(_Watched):
    """All rows of an epoch are the nodes', which count them once they have fetched them."""


class Reading(_Watched):
    """The nodes read the rows of all epochs, or those of one before they are dealt anew."""


class CuttingShort(_OfRun):
    """The call ends within an epoch: the nodes count what they have of it."""


class Holding(_OfRun):
    """The call ends while nodes read epochs from their logs: each says which one it reads."""


Running = Opening | Delivering | Explaining | Cutting | Reading | CuttingShort | Holding
State = Idle | Running


# what can happen


@dataclass(frozen=True)
class NodesSeen:
    """Something new is known of the nodes."""

    nodes: Nodes


@dataclass(frozen=True)
class RowsSpooled:
    """Agents hold rows that feeders have brought; each by the id of its node."""

    reports: tuple[tuple[int, Spooled], ...]


@dataclass(frozen=True)
class Requested:
    """A request has come, which waits for its turn."""

    request: Request


@dataclass(frozen=True)
class StreamStopped:
    """The stream gets no more micro-batches."""


@dataclass(frozen=True)
class JobEnded:
    """The Spark job `job` has fed every partition."""

    job: int
    fed: tuple[FedPartition, ...]


@dataclass(frozen=True)
class JobBroke:
    """The Spark job `job` has failed, or was cancelled.

    Attributes:
        is_of_data: the data or the call is the reason; no node has to do with it.
        is_cut_off: feeders have lost the connection to a node.
    """

    job: int
    error: Exception
    is_of_data: bool = False
    is_cut_off: bool = False


@dataclass(frozen=True)
class LogFetched:
    """The last lines of a node's log, or none if it did not answer.

    Attributes:
        unfed: which feeds are read and never fed, in words.
    """

    node_id: int
    lines: tuple[str, ...]
    unfed: str = ""


@dataclass(frozen=True)
class DeadlinePassed:
    """The state's deadline has passed."""


Event = (
    NodesSeen
    | RowsSpooled
    | Requested
    | StreamStopped
    | JobEnded
    | JobBroke
    | LogFetched
    | DeadlinePassed
)


# what is to be done


@dataclass(frozen=True)
class Send:
    """Send `message` to the agents of some nodes, as long as the world is of `generation`."""

    message: ToAgent
    node_ids: frozenset[int]
    generation: int


@dataclass(frozen=True)
class StartJob:
    """Have Spark feed `data`; the thread of the call `ticket` runs the job, if one waits."""

    job: int
    data: Any
    spec: FeedSpec
    ticket: int | None


@dataclass(frozen=True)
class CancelJob:
    """End the feed's job soon."""

    job: int


@dataclass(frozen=True)
class FetchLines:
    """Ask for the last lines of a node's log."""

    node_id: int


@dataclass(frozen=True)
class Answer:
    """Answer the request of `ticket`: with a report, a stream, an error to raise, or nothing."""

    ticket: int
    value: Any


@dataclass(frozen=True)
class KeepProblem:
    """Rows that were to be fed again in the background could not be; raise it at the next call."""

    error: Exception


@dataclass(frozen=True)
class Warn:
    """Tell the log, at WARNING."""

    text: str


@dataclass(frozen=True)
class ShowEpochs:
    """Show how epochs have come to the nodes: the first by `way`, those after it from their logs.

    Attributes:
        way: `feeders` of partitions, or `files` that the nodes have read.
        rows: of each epoch.
    """

    first: int
    last: int
    way: str
    rows: int


Action = Send | StartJob | CancelJob | FetchLines | Answer | KeepProblem | Warn | ShowEpochs
S = TypeVar("S", bound=State)
R = TypeVar("R", bound=Running)
W = TypeVar("W", Delivering, Cutting, Reading)
Step = tuple[S, list[Action]]
"""What a handler returns: `Step[Cutting | Idle]` where one of these is what comes next."""


def wakes_s(state: State) -> float:
    """Return when to look at a feed again though nothing happens."""
    if isinstance(state, Delivering):
        return min(state.deadline_s, state.run.table.due_s)
    return state.deadline_s


def with_feed(state: S, **changes: Any) -> S:
    """Return the state with changes to what is known of the feed."""
    return replace(state, feed=replace(state.feed, **changes))


def with_run(state: R, **changes: Any) -> R:
    """Return the state with changes to its run."""
    return replace(state, run=replace(state.run, **changes))


def added(*rows: Mapping[Any, int]) -> dict[Any, int]:
    """Return the sums of rows by key."""
    total: Counter[Any] = Counter()
    for each in rows:
        total.update(each)
    return dict(total)
