"""The messages between agents and the coordinator.

Runs in: driver, agent

    agent                                   coordinator
      │  Hello ───────────────────────────────▶│   once per connection, first; or only `StartFailed`
      │  ChildReady(generation, port) ────────▶│   a child is coming up, its port is held
      │◀──────────────────────── Begin(world)  │   when every node has a ready child
      │  ChildRunning ────────────────────────▶│   inside map_fun
      │  FeedProgress, NodeActive, LogLines ──▶│
      │  BoardStarted ────────────────────────▶│   from the first node, where it was asked for
      │  Spooled ─────────────────────────────▶│   rows that feeders have brought to this agent
      │◀── FeedBegin, ReadShare, Assign, FeedCut, FeedCovered, Granted, EpochEnd, FeedEnd
      │  CheckpointPart ──────────────────────▶│   from each node that trains
      │◀──────────────────── CheckpointCommit ─│   to the first, once all parts are there
      │  CheckpointDone ──────────────────────▶│   from the first
      │  Gather ──────────────────────────────▶│   from each node that trains
      │◀───────────────────────── AllGathered ─│   to all of them, once all have
      │◀──────────────────────────────── Fetch │   at any time
      │  Fetched ─────────────────────────────▶│   and when a child has ended
      │  ChildReturned | ChildFailed ─────────▶│
      │◀──── StopChild, NewRound, Stop         │

Each message is one JSON text frame of one of these types.
"""

from __future__ import annotations

import msgspec

from sparkdl.control.rows import Digest, EpochRows, FeedCount, Share
from sparkdl.core.errors import ProtocolError
from sparkdl.core.failure import Failure
from sparkdl.core.row_ranges import Slice, Sliced, Span, Spans
from sparkdl.core.world import Resume, World

MAX_MESSAGE_NBYTES = 16 * 1024 * 1024
"""One message at most. The largest are return values of `map_fun`, then worlds of many nodes."""


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the JSON field `type` holds the class name."""


class Hello(Message, frozen=True):
    node_id: int
    task: str
    """The Spark task that started it, the same for each of its attempts; empty without Spark."""
    agent_id: str
    host: str
    pid: int
    data_address: str
    owner: str
    """Its parent: a `task` of Spark, whose slot it keeps until `Detach`; `process`: local."""


class Detached(Message, frozen=True):
    """The agent is detached from its Spark task, whose slot is free again."""


class StartFailed(Message, frozen=True):
    """A node cannot start on its executor: sent by its task instead of an agent's `Hello`.

    `kind` is the name of the error to raise at the driver, `text` its message.
    """

    kind: str
    text: str


class ChildReady(Message, frozen=True):
    """A child for `generation` is coming up, and `port` is held for its framework."""

    generation: int
    port: int


class ChildRunning(Message, frozen=True):
    """The child has entered `map_fun`."""

    generation: int
    pid: int


class ChildReturned(Message, frozen=True):
    """`map_fun` has returned `result` (msgpack, see `control.values`).

    A child's last message, which its agent passes on once the child has ended.

    `result_problem` says why there is no result when the value could not be encoded, `has_exited`
    whether `map_fun` called `sys.exit(0)` instead of returning.
    """

    generation: int
    result: bytes
    result_problem: str = ""
    has_exited: bool = False


class ChildFailed(Message, frozen=True):
    """The child has ended in any other way.

    Args:
        age_s: seconds since then, by a clock of the node that does not jump. The driver dates the
            failure by it: what happened first must not depend on how the hosts' clocks are set.
    """

    generation: int
    failure: Failure
    age_s: float | None = None


class FeedProgress(Message, frozen=True):
    """The rows that one node has received and consumed in the world of a generation.

    Sent on change: at once if the driver waits for it, otherwise a few times a second at most.
    """

    generation: int
    counts: tuple[FeedCount, ...]


class SpooledRange(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one partition, in one segment of an agent's spool.

    Attributes:
        number: of the segment, at this agent.
        start: the number of its first row in the partition.
        skip: rows of the segment before it.
        nbytes: in memory, or on disk.
        digest: of the partition's rows up to the segment's last.
        batch_rows: of global batches whose slices lie together in the segment, if they do.
        skips: instead of `skip`, for each slice: where its rows would begin in the segment if it
            also had those before `start`, see `row_ranges.Slice`.

    One of segment -1, without rows, says that the partition ends at `start`.
    """

    number: int
    partition: int
    start: int
    skip: int
    rows: int
    nbytes: int = 0
    digest: Digest | None = None
    batch_rows: int = 0
    skips: tuple[int, ...] = ()


class Spooled(Message, frozen=True):
    """An agent holds these rows of an epoch, which wait for an `Assign`.

    Args:
        room_nbytes: how many bytes the agent may hold, of all feeds.
        is_full: rows of the epoch have waited for room in the spool.
    """

    generation: int
    feed: str
    epoch: int
    ranges: tuple[SpooledRange, ...]
    room_nbytes: int
    is_full: bool = False


class NodeActive(Message, frozen=True):
    """A child's progress beside its feeds; sent on change, a few times a second at most.

    Args:
        step: the last one that user code has reported (`ctx.report`), -1 for none.
        metrics: text where it is no finite number, for which JSON has no other way.
        batches: of files that the node reads itself (`sparkdl.parquet`).
        log_nbytes: printed so far; looked at seldom.
        watched_s: seconds in `map_fun` in which it was looked at; see `node/waits.py`.
        rows_s: of these the seconds that it waited for rows.
        others_s: of these the seconds that it waited for other nodes; below 0 if unknown.
    """

    generation: int
    step: int = -1
    metrics: dict[str, float | str] = {}
    batches: int = 0
    log_nbytes: int = 0
    watched_s: float = 0.0
    rows_s: float = 0.0
    others_s: float = -1.0

    @property
    def numbers(self) -> dict[str, float]:
        return {name: float(value) for name, value in self.metrics.items()}


class NodeLoad(Message, frozen=True):
    """The load of a child and its processes on their machine; sent only if a reader asks for it.

    Args:
        cores: that were busy for it since the last time.
        memory_nbytes: resident.
        feed_nbytes: of rows that wait at the node in memory, of `feed_limit_nbytes` at most.
        gpu: share of the time in which its GPUs were busy, their mean.
        gpu_nbytes: in use on them, by others as well.
    """

    cores: float
    memory_nbytes: int
    feed_nbytes: int = 0
    feed_limit_nbytes: int = 0
    gpu: float = 0.0
    gpu_nbytes: int = 0


class LogLines(Message, frozen=True):
    """Lines the child has printed.

    Attributes:
        errors: indices of the lines that a child has marked as its error output.
    """

    lines: tuple[str, ...]
    errors: tuple[int, ...] = ()


class Fetched(Message, frozen=True):
    """The answer to a `Fetch`; without one, before how a child ended, that child's last lines."""

    text: str
    request: int = -1


class BoardStarted(Message, frozen=True):
    """TensorBoard answers on `port` of the node's host; or why it does not."""

    port: int = 0
    pid: int = 0
    problem: str = ""
    is_missing: bool = False


class CheckpointPart(Message, frozen=True):
    """A node's part of the checkpoint of `step` is written, and these rows made its state.

    Args:
        feeds: by feed, the rows used since the child started, and those before, from the agent.
        problem: why the part could not be written instead; empty if it was.
    """

    generation: int
    step: int
    feeds: dict[str, EpochRows]
    problem: str = ""


class CheckpointDone(Message, frozen=True):
    generation: int
    step: int
    url: str


class CheckpointCommit(Message, frozen=True):
    """How far the parts are; once all are written, the checkpoint can be made complete.

    Args:
        manifest: JSON, to be written into it; empty until all parts are written.
        missing: names of the nodes whose parts are awaited.
        problem: why there will be no checkpoint of this step.
    """

    generation: int
    step: int
    manifest: str = ""
    missing: tuple[str, ...] = ()
    problem: str = ""


class Gather(Message, frozen=True):
    """A node's value for the gathering `number`: even ones are its calls of `ctx.all_gather`."""

    generation: int
    number: int
    value: bytes


class AllGathered(Message, frozen=True):
    """The values of all nodes that train, by rank; or `problem`, why they will not all be there."""

    generation: int
    number: int
    values: tuple[bytes, ...]
    problem: str = ""


class Begin(Message, frozen=True):
    """The world is complete: run `map_fun`, from `resume` on."""

    world: World
    resume: Resume = Resume()


class NewRound(Message, frozen=True):
    generation: int


class StopChild(Message, frozen=True):
    """End the child; the agent stays.

    Args:
        reason: the cluster's final failure, if the end has one.
    """

    generation: int
    reason: str = ""


class FeedBegin(Message, frozen=True):
    """Epochs `epoch` to `last_epoch` of a feed are to come, and none before them any more.

    Args:
        run: of the job that brought the rows before. The agent reports the rows that it still
            holds and no child has (`Spooled`), before it reports `FeedCount.began`.
        retain: rows that are read from now on: they will be assigned again.
    """

    feed: str
    epoch: int
    last_epoch: int
    run: str = ""
    retain: bool = False


class ReadShare(Message, frozen=True):
    """Read these rows of files into the spool, as rows of partition 0; the rest as in `Assign`.

    Attributes:
        in_order: the rows may wait for all others.
        slices: the rows of a global batch, and how many slices of it nodes will be assigned.
    """

    feed: str
    epoch: int
    share: Share
    run: str = ""
    keep: bool = False
    in_order: bool = False
    slices: tuple[int, int] | None = None


class AssignedRange(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one segment, for one node.

    Attributes:
        holder: the node, by id, in whose agent's spool the segment is.
        number: of the segment, there.
        skip: rows of the segment before the first assigned one.
        spans: the partition and numbers of these rows, in order.
        of_slice: of the spans only the rows in this slice, see `row_ranges.Slice`.
    """

    holder: int
    number: int
    skip: int
    rows: int
    spans: tuple[Span, ...]
    of_slice: Slice | None = None

    @property
    def parts(self) -> Spans:
        return self.spans if self.of_slice is None else Sliced(self.spans, (self.of_slice,))


class Assign(Message, frozen=True):
    """These rows of an epoch are the node's, in this order.

    Args:
        run: of the Spark job, or the pass over files, that has brought them.
        uris: where the agents of other holders are: Arrow Flight URIs, by node id.
        unwanted: rows of the node's own spool that no node reads.
        keep: later epochs are to read the rows again.
        in_order: the child gets the rows in this order, wherever they are.
    """

    feed: str
    epoch: int
    run: str
    ranges: tuple[AssignedRange, ...] = ()
    uris: dict[int, str] = {}
    unwanted: tuple[SpooledRange, ...] = ()
    keep: bool = False
    in_order: bool = False


class FeedCut(Message, frozen=True):
    """Count the rows of `epoch`, once all that are the node's are here, and take no more of it.

    Args:
        is_short: count the rows that are here now.
    """

    feed: str
    epoch: int
    is_short: bool = False


class FeedCovered(Message, frozen=True):
    """A checkpoint covers all epochs before `epoch`: their rows need not be reported again."""

    feed: str
    epoch: int


class Granted(Message, frozen=True):
    """Every node has `rows` rows of `epoch` at least, so that steps within them find everybody."""

    feed: str
    epoch: int
    rows: int


class EpochEnd(Message, frozen=True):
    """All rows of an epoch have been delivered.

    Args:
        rows: rows of this epoch by node id, one entry per fed node.
        again: the next epoch reads the same rows again.
        goes_on: the next epoch belongs to the same iteration.
    """

    feed: str
    epoch: int
    rows: dict[int, int]
    again: bool = False
    goes_on: bool = False


class FeedEnd(Message, frozen=True):
    """No more rows will come: consumers see the end once they have read the remaining rows."""

    feeds: tuple[str, ...]


class Fetch(Message, frozen=True):
    """Send the last `lines` that the child has printed; or its Python stacks, or why not."""

    request: int
    lines: int | None = None


class Stop(Message, frozen=True):
    """End the child, clean up, and end.

    Attributes:
        is_patient: only once no task reads results of inference from this node any more.
    """

    grace_s: float
    is_patient: bool = False


class Detach(Message, frozen=True):
    """Let go of the Spark task, and live as long as the executor."""


FromAgent = (
    Hello
    | Detached
    | ChildReady
    | ChildRunning
    | ChildReturned
    | ChildFailed
    | FeedProgress
    | Spooled
    | NodeActive
    | NodeLoad
    | StartFailed
    | LogLines
    | Fetched
    | BoardStarted
    | CheckpointPart
    | CheckpointDone
    | Gather
)
ToFeeds = FeedBegin | ReadShare | Assign | FeedCut | FeedCovered | Granted | EpochEnd | FeedEnd
ToNode = CheckpointCommit | AllGathered
ToAgent = Begin | NewRound | StopChild | Fetch | Stop | Detach | ToNode | ToFeeds


_encoder = msgspec.json.Encoder()
_from_agent: msgspec.json.Decoder[FromAgent] = msgspec.json.Decoder(FromAgent)
_to_agent: msgspec.json.Decoder[ToAgent] = msgspec.json.Decoder(ToAgent)


def encode(message: FromAgent | ToAgent) -> str:
    return _encoder.encode(message).decode()


def decode_from_agent(data: str | bytes) -> FromAgent:
    try:
        return _from_agent.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ProtocolError(f"an agent sent an invalid message: {error}") from None


def decode_to_agent(data: str | bytes) -> ToAgent:
    try:
        return _to_agent.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ProtocolError(f"the coordinator sent an invalid message: {error}") from None
