"""The table of a feed's life, by hand and against simulated nodes in random order."""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given, strategies as st
from msgspec import structs

from sparkdl.control import messages as msg
from sparkdl.control.messages import AssignedRange, EpochEnd, FeedBegin, FeedCut, SpooledRange
from sparkdl.control.rows import EpochCount, EpochRows, FeedCount, ReadCounts, merge_epochs
from sparkdl.core import errors
from sparkdl.core.errors import FeedClosedError, LaunchError, SparkdlError
from sparkdl.core.spec import plan_nodes
from sparkdl.core.world import Address, World, build_world
from sparkdl.driver.feeds import state as fs
from sparkdl.driver.feeds.coverage import CallHistory, FeedRequest
from sparkdl.driver.feeds.report import FeedReport
from sparkdl.driver.feeds.table import WINDOW_NBYTES
from sparkdl.driver.feeds.transitions import LOOKS, REASON_S, TRANSITIONS, step
from sparkdl.feed.transfer.messages import FedPartition, FeedSpec
from tests.doubles.machines import Played, declared_steps_only

TIMEOUT_S = 600.0
ANSWER_S = 63.0
ROOM_NBYTES = 1 << 30
BOTH = frozenset({0, 1})

steps_are_declared = declared_steps_only(TRANSITIONS, LOOKS)


def world_of(num_nodes: int, generation: int = 0) -> World:
    nodes = plan_nodes(num_nodes)
    return build_world(
        generation,
        {n: Address("host", 9000 + n.node_id, f"grpc://host:{n.node_id}") for n in nodes},
    )


def feed_of(num_nodes: int, keeps: bool = True) -> fs.Feed:
    order = FeedSpec("input", 0, "", (), "token", TIMEOUT_S)
    nodes = fs.Nodes(0, world_of(num_nodes))
    return fs.Feed(CallHistory("input", keeps), order, ANSWER_S, nodes)


# by hand


class Play(Played):
    """A feed of two nodes, and what it has asked for."""

    state: fs.State

    def __init__(self) -> None:
        super().__init__(step, fs.Idle(feed_of(2)), fs.DeadlinePassed(), tick_s=0.0)
        self.counts = {0: FeedCount("input"), 1: FeedCount("input")}
        self.progress = 0

    def asked(self, epochs: int = 1, ticket: int = 7, **asked: Any) -> list[fs.Action]:
        return self.say(fs.Requested(fs.QueuedCall(ticket, FeedRequest("data", epochs, **asked))))

    def seen(self, *nodes: dict[str, Any], **known: Any) -> list[fs.Action]:
        """Have the nodes tell counts, one after the other."""
        for node_id, count in enumerate(nodes):
            self.counts[node_id] = structs.replace(self.counts[node_id], **count)
            self.progress += 1
        now = {"counts": dict(self.counts), "progress": self.progress, **known}
        return self.say(fs.NodesSeen(replace(self.state.feed.nodes, **now)))

    def spooled(
        self, *rows: int, part: int = 0, generation: int = 0, nbytes: int = 1
    ) -> list[fs.Action]:
        """Have the agents report so many rows of a partition, one after the other."""
        said, start = list[fs.Action](), 0
        for node_id, num_rows in enumerate(rows):
            ranges = (SpooledRange(0, part, start, 0, num_rows, nbytes),)
            message = msg.Spooled(generation, "input", 0, ranges, ROOM_NBYTES)
            said += self.say(fs.RowsSpooled(((node_id, message),)))
            start += num_rows
        return said


def fed(rows: int) -> tuple[FedPartition, ...]:
    return (FedPartition(0, rows),)


def sent(message: Any) -> fs.Send:
    return fs.Send(message, BOTH, 0)


CUT_SHORT = sent(FeedCut("input", 0, is_short=True))


def assigned(start: fs.StartJob, node_id: int, *ranges: AssignedRange) -> list[fs.Action]:
    holders = {each.holder for each in ranges} - {node_id}
    uris = {holder: f"grpc://host:{holder}" for holder in sorted(holders)}
    assign = msg.Assign(
        "input", start.spec.epoch, start.spec.run, ranges, uris, keep=start.spec.keep
    )
    return [fs.Send(assign, frozenset({node_id}), start.spec.generation)]


def brought(play: Play, job: int, *rows: int) -> list[fs.Action]:
    """Have a job end that has brought so many rows of partition 0 to each agent."""
    return [*play.spooled(*rows), *play.say(fs.JobEnded(job, fed(sum(rows))))]


def test_a_call_of_one_epoch_from_the_first_word_to_the_report() -> None:
    play = Play()
    begin, start = play.asked()
    assert begin == sent(FeedBegin("input", 0, 0))
    assert isinstance(start, fs.StartJob)
    assert (start.job, start.data, start.ticket) == (1, "data", 7)
    assert play.spooled(5, 4) == [
        *assigned(start, 0, AssignedRange(0, 0, 0, 4, ((0, 0, 4),))),
        *assigned(start, 1, AssignedRange(1, 0, 0, 4, ((0, 5, 9),))),
    ], "so that both have equally many"
    assert play.seen({"epoch_rows": 5}, {"epoch_rows": 4}) == [sent(msg.Granted("input", 0, 4))]
    assert play.say(fs.JobEnded(1, fed(10))) == [], "the last row has not been reported"
    last = msg.Spooled(0, "input", 0, (SpooledRange(1, 0, 9, 0, 1, 1),), ROOM_NBYTES)
    assert play.say(fs.RowsSpooled(((1, last),))) == [
        *assigned(start, 0, AssignedRange(0, 0, 4, 1, ((0, 4, 5),))),
        *assigned(start, 1, AssignedRange(1, 1, 0, 1, ((0, 9, 10),))),
        sent(FeedCut("input", 0)),
    ]
    counted = [{"cut": EpochCount(0, 5), "epoch_rows": 0, "rows_received": 5}] * 2
    assert play.seen(*counted) == [sent(EpochEnd("input", 0, {0: 5, 1: 5}))]
    assert isinstance(play.state, fs.Reading)
    assert play.seen({"given": ReadCounts(5)}) == []
    (answer,) = play.seen({}, {"given": ReadCounts(5)})
    rows = {"worker:0": 5, "worker:1": 5}
    steps = dict.fromkeys(rows, 0)
    assert answer == fs.Answer(7, FeedReport(1, rows, steps, rows_used=10, passes=1))
    assert isinstance(play.state, fs.Idle)


def test_node_that_waits_with_all_its_rows_gets_more() -> None:
    play = Play()
    play.asked()
    play.spooled(2, 2, nbytes=WINDOW_NBYTES // 2)
    assert play.spooled(2, 2, part=1, nbytes=WINDOW_NBYTES // 2) == []
    assert play.seen({"is_waiting": True}) == [], "its rows are on the way"
    assert len(play.seen({"rows_received": 2})) == 2, "one message for each node: both get two rows"


def test_rows_are_retained_for_a_shuffle_that_follows() -> None:
    for epochs in (1, 2):
        begin, _ = Play().asked(epochs, shuffle="global")
        assert begin == sent(FeedBegin("input", 0, epochs - 1, retain=epochs > 1))


def test_node_that_reads_its_log_on_does_not_keep_a_call_that_another_has_ended() -> None:
    play = Play()
    play.asked(epochs=5)
    brought(play, 1, 2, 2)
    whole = {"cut": EpochCount(0, 2, is_whole=True)}
    play.seen(whole, whole)
    assert play.seen({"closed_to": 4}) == []
    assert play.seen({}, {"given": ReadCounts(4, epochs=2)}) == []
    both = deepcopy(play)
    *_, answer = play.expire()
    assert isinstance(answer, fs.Answer)
    assert play.now_s == REASON_S
    *_, answer = both.seen({}, {"closed_to": 4})
    assert isinstance(answer, fs.Answer)


def test_job_that_nobody_wants_is_cancelled_and_what_came_is_an_epoch() -> None:
    play = Play()
    play.asked()
    assert play.seen({"closed_to": 0}) == [fs.CancelJob(1), CUT_SHORT]
    assert play.say(fs.JobFailed(1, RuntimeError("cancelled"))) == []
    assert isinstance(play.state, fs.CuttingShort)
    end, *_, answer = play.seen({"cut": EpochCount(0, 3)}, {"cut": EpochCount(0, 0)})
    assert end == sent(EpochEnd("input", 0, {0: 0, 1: 0})), "a node has no row: none has stepped"
    assert isinstance(answer, fs.Answer)
    assert isinstance(answer.value, FeedReport)


def test_task_that_spark_repeats_must_send_the_same_rows() -> None:
    play = Play()
    play.asked()

    def sends(node: int, digest: tuple[int, int]) -> list[fs.Action]:
        ranges = (SpooledRange(0, 0, 0, 0, 9, 1, digest),)
        report = msg.Spooled(0, "input", 0, ranges, ROOM_NBYTES)
        return play.say(fs.RowsSpooled(((node, report),)))

    for digest in ((9, 1), (5, 2), (9, 1)):
        assert CUT_SHORT not in sends(0, digest), "rows before the furthest are not compared"
    assert CUT_SHORT in sends(1, (9, 3))
    assert "partition 0 again, and its first 9 rows" in str(play.expire()[-1])


def test_job_that_failed_gives_nodes_time_to_say_why() -> None:
    play = Play()
    play.asked()
    error = RuntimeError("Task 0 failed 4 times")
    assert play.say(fs.JobFailed(1, error, REASON_S)) == []
    assert isinstance(play.state, fs.Delivering)
    assert play.state.deadline_s == REASON_S
    cause = LaunchError("worker:1 was killed")
    assert play.seen(problem=cause, has_failed=True, generation=None, world=None) == [
        fs.Answer(7, cause)
    ]
    again = Play()
    again.asked()
    again.say(fs.JobFailed(1, error, REASON_S))
    assert again.expire() == [CUT_SHORT], "nobody says: the job's own error counts"
    assert again.expire()[-1] == fs.Answer(7, error), "though no node has counted"


def test_ended_node_does_not_end_the_call_and_may_have_received_rows() -> None:
    play = Play()
    play.asked()
    assert play.seen({}, {"closed": True}) == [], "the other node trains on"
    error = RuntimeError("bad data")
    assert play.say(fs.JobFailed(1, error)) == [CUT_SHORT]
    end, answer = play.seen({"cut": EpochCount(0)})
    assert end == sent(EpochEnd("input", 0, {0: 0}))
    assert answer == fs.Answer(7, error)


def test_job_that_brings_no_row_is_told_with_the_slots_it_may_wait_for() -> None:
    play = Play()
    play.asked(timeout_s=9.0)
    assert play.expire() == [fs.CancelJob(1), CUT_SHORT]
    assert play.say(fs.JobEnded(1, fed(0))) == []
    *_, answer = play.seen({"cut": EpochCount(0)}, {"cut": EpochCount(0)})
    assert isinstance(answer, fs.Answer)
    assert isinstance(answer.value, errors.FeedTimeoutError)
    assert "has brought no row to any node for 9 s" in str(answer.value)
    assert "waits for a task slot that nodes or other jobs hold" in str(answer.value)


def test_next_generation_cancels_the_last_job_and_finds_what_agents_still_have() -> None:
    play = Play()
    _, first = play.asked()
    assert isinstance(first, fs.StartJob)
    assert play.seen(generation=1, world=None) == [fs.CancelJob(1)]
    assert play.say(fs.JobFailed(1, RuntimeError("cancelled"))) == []
    assert isinstance(play.state, fs.Idle)
    (begin,) = play.seen(generation=1, world=world_of(2, 1))
    assert begin == fs.Send(FeedBegin("input", 0, 0, run=first.spec.run), BOTH, 1)
    assert isinstance(play.state, fs.Opening), "agents may still have rows of that job"
    assert play.spooled(3, generation=1) == []
    assert play.seen({"began": 0}) == []
    (start,) = play.expire()  # what an agent does not report is brought again
    assert isinstance(start, fs.StartJob)
    assert start.spec.run == first.spec.run, "so that they are found after another restart too"
    assert start.spec.done == {0: ((0, 3),)}, "these are here, and are not brought again"
    assert start.spec.generation == 1


def test_rows_that_cannot_be_fed_again_are_told_where_somebody_waits_or_kept() -> None:
    once = Play()
    data = iter(range(3))
    once.say(fs.Requested(fs.QueuedCall(7, FeedRequest(data))))
    once.say(fs.JobFailed(1, RuntimeError("lost"), REASON_S))
    (answer,) = once.seen(generation=1, world=world_of(2, 1))
    assert isinstance(answer, fs.Answer)
    assert isinstance(answer.value, FeedClosedError)
    later = Play()
    later.say(fs.Requested(fs.QueuedCall(7, FeedRequest(data))))
    brought(later, 1, 1, 1)
    later.seen({"cut": EpochCount(0, 1)}, {"cut": EpochCount(0, 1)})
    later.seen({"given": ReadCounts(1)}, {"given": ReadCounts(1)})
    (kept,) = later.seen(generation=1, world=world_of(2, 1))
    assert isinstance(kept, fs.KeepProblem)


# against simulated nodes


Row = tuple[int, int, int]
"""Call, partition, number in the partition."""


class Spooling(NamedTuple):
    epoch: int
    run: str
    row: Row


@dataclass
class SimulatedNode:
    """Agent and child of a node, as far as a feed sees them."""

    node_id: int
    inbox: deque[Any] = field(default_factory=deque)
    rows: dict[int, list[Row]] = field(default_factory=dict)
    ends: dict[int, EpochEnd] = field(default_factory=dict)
    begins: list[int] = field(default_factory=list)
    last: int = -1
    """The last epoch that was announced."""
    began: int = -1
    cut: int = -1
    cut_rows: int = 0
    closed_to: int = -1
    closed: bool = False
    spool: dict[int, Spooling] = field(default_factory=dict)
    """Rows that no node has been assigned, or has fetched, by number."""
    retained: list[tuple[str, Row]] = field(default_factory=list)
    """Rows that no child has any more, and the run that brought them."""
    retains: bool = False
    runs: dict[Row, str] = field(default_factory=dict)
    fetching: deque[tuple[AssignedRange, int, str]] = field(default_factory=deque)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    reading: int = 0
    position: int = 0
    received: int = 0
    consumed: int = 0
    used: dict[int, list[Row]] = field(default_factory=dict)
    """By epoch, in this generation."""

    def hear(self, message: Any) -> None:
        if isinstance(message, FeedBegin):
            self.began, self.last = message.epoch, max(self.last, message.last_epoch)
            self.retains = message.retain
            self.begins.append(message.epoch)
        elif isinstance(message, FeedCut):
            self._cut(message.epoch)
        elif isinstance(message, EpochEnd):
            self._cut(message.epoch)
            self.ends[message.epoch] = message

    def _cut(self, epoch: int) -> None:
        if epoch > self.cut:
            self.cut, self.cut_rows = epoch, len(self.rows.get(epoch, []))

    def spools(self, epoch: int) -> bool:
        return epoch > max(self.cut, self.closed_to)

    def receive(self, epoch: int, row: Row, run: str) -> None:
        if not self.closed and epoch > max(self.cut, self.closed_to):
            self.rows.setdefault(epoch, []).append(row)
            self.runs[row] = run
            self.received += 1

    def keep_for_next(self) -> list[tuple[str, Row]]:
        """Return what an agent may still have when its next child begins."""
        spooled = ((each.run, each.row) for each in self.spool.values())
        return [*((run, row) for row, run in self.runs.items()), *spooled, *self.retained]

    def terminate(self) -> None:
        self.closed_to = max(self.last, self.cut)
        if self.reading <= self.closed_to:
            self.reading, self.position = self.closed_to + 1, 0

    def read(self) -> bool:
        """Use a row, or go on to the next epoch; return whether there was something to do."""
        rows = self.rows.get(self.reading, [])
        if self.position < len(rows):
            self.used.setdefault(self.reading, []).append(rows[self.position])
            self.position += 1
            self.consumed += 1
            return True
        end = self.ends.get(self.reading)
        if end is not None:
            if end.again:
                self.rows[self.reading + 1] = rows
            elif self.retains:
                gone = [row for row in rows if row in self.runs]
                self.retained += [(self.runs.pop(row), row) for row in gone]
            self.reading, self.position = self.reading + 1, 0
            return True
        skipped = end is None and self.reading not in self.rows
        if skipped and (behind := [epoch for epoch in self.begins if epoch > self.reading]):
            self.reading, self.position = min(behind), 0
            return True
        return False

    def count(self, may_be_whole: bool) -> FeedCount:
        epoch = max(self.cut + 1, self.began, 0)
        ends: Any = {"closed": self.closed, "closed_to": self.closed_to, "began": self.began}
        return FeedCount(
            *("input", self.received, ReadCounts(self.consumed, self.reading)),
            epoch_rows=len(self.rows.get(epoch, [])),
            cut=EpochCount(self.cut, self.cut_rows, may_be_whole),
            is_waiting=self.position >= len(self.rows.get(self.reading, [])),
            **ends,
        )


@dataclass
class Data:
    """What a call feeds: so many rows in each partition."""

    call: int
    sizes: tuple[int, ...]


@dataclass
class Job:
    start: fs.StartJob
    left: list[tuple[int, int]]
    all_rows: list[tuple[int, int]]
    refused: Counter[int] = field(default_factory=Counter)
    is_cancelled: bool = False


class Simulation:
    """A feed's state machine, its nodes, its Spark jobs, checkpoints and restarts."""

    def __init__(self, num_nodes: int, draw: Callable[[int], int], logs_are_whole: bool) -> None:
        self.num_nodes = num_nodes
        self.draw = draw
        """Returns a number below its argument."""
        self.logs_are_whole = logs_are_whole
        self.now_s = 0.0
        self.generation = 0
        self.is_decided = True
        self.nodes = self._new_nodes()
        self.state: fs.State = fs.Idle(feed_of(num_nodes))
        self.jobs: dict[int, Job] = {}
        self.answers: dict[int, Any] = {}
        self.asked: dict[int, tuple[Data, int]] = {}
        self.problem: SparkdlError | None = None
        self.finished: set[int] = set()
        self.restored: Counter[Row] = Counter()
        self.saved: Counter[Row] = Counter()
        self.seen_before: Any = None
        self.progress = 0
        self.reports: deque[tuple[int, msg.Spooled]] = deque()
        self.room_nbytes = 4 * (1 + draw(5))
        """A window is a quarter of it: of one to five rows."""

    def _new_nodes(self) -> dict[int, SimulatedNode]:
        return {n: SimulatedNode(n) for n in range(self.num_nodes)}

    @property
    def history(self) -> CallHistory:
        return self.state.feed.history

    # what may happen

    def ask(self) -> bool:
        if len(self.asked) >= 3 or self.problem:
            return False
        ticket = len(self.asked)
        sizes = tuple(self.draw(5) for _ in range(1 + self.draw(3)))
        data, epochs = Data(ticket, sizes), 1 + self.draw(3)
        self.asked[ticket] = data, epochs
        request = FeedRequest(data, epochs, shuffle="global" if self.draw(2) else None)
        self.take(fs.Requested(fs.QueuedCall(ticket, request)))
        return True

    def deliver_message(self) -> bool:
        full = [node for node in self.nodes.values() if node.inbox]
        if not full:
            return False
        node = full[self.draw(len(full))]
        is_short = isinstance(node.inbox[0], FeedCut) and node.inbox[0].is_short
        if node.fetching and not is_short:  # marks wait for rows that were assigned before
            return self.fetch()
        message = node.inbox.popleft()
        if isinstance(message, msg.Assign):
            self._assign(node, message)
        elif isinstance(message, FeedBegin) and message.run:
            self._recall(node, message)
        node.hear(message)
        return True

    def _assign(self, node: SimulatedNode, order: msg.Assign) -> None:
        for piece in order.unwanted:
            del node.spool[piece.number]
        for each in order.ranges:
            if each.holder == node.node_id:
                node.receive(order.epoch, node.spool.pop(each.number).row, order.run)
            else:
                node.fetching.append((each, order.epoch, order.run))

    def _recall(self, node: SimulatedNode, begin: FeedBegin) -> None:
        for run, row in node.retained:
            if run == begin.run:
                self._spool(node, begin.epoch, run, row)
        node.retained = [(run, row) for run, row in node.retained if run != begin.run]

    def _spool(self, node: SimulatedNode, epoch: int, run: str, row: Row) -> None:
        number = next(node.numbers)
        node.spool[number] = Spooling(epoch, run, row)
        piece = SpooledRange(number, row[1], row[2], 0, 1, 1)
        message = msg.Spooled(self.generation, "input", epoch, (piece,), self.room_nbytes)
        self.reports.append((node.node_id, message))

    def fetch(self) -> bool:
        """Have a node fetch a row that another one's agent holds."""
        nodes = [node for node in self.nodes.values() if node.fetching]
        if not nodes:
            return False
        node = nodes[self.draw(len(nodes))]
        each, epoch, run = node.fetching.popleft()
        node.receive(epoch, self.nodes[each.holder].spool.pop(each.number).row, run)
        return True

    def report(self) -> bool:
        if not self.reports:
            return False
        node_id, message = self.reports.popleft()
        self.take(fs.RowsSpooled(((node_id, message),)))
        return True

    def repeat(self) -> bool:
        """Have Spark run a task again: it brings all its rows once more."""
        job = next(iter(self.jobs.values()), None)
        if job is None or not job.left:
            return False
        partition = job.left[0][0]
        others = [each for each in job.left if each[0] != partition]
        job.left = [each for each in job.all_rows if each[0] == partition] + others
        job.refused[partition] = 0
        return True

    def wake(self) -> bool:
        """Let the time come at which the driver wants to look again."""
        due_s = self.state.run.table.due_s if isinstance(self.state, fs.Delivering) else math.inf
        if math.isinf(due_s):
            return False
        self.now_s = max(self.now_s, due_s)
        self.take(fs.DeadlinePassed())
        return True

    def bring_row(self) -> bool:
        job = next(iter(self.jobs.values()), None)
        if job is None or not job.left:
            return False
        partition, number = job.left.pop(0)
        order = job.start.spec
        targets = order.targets
        node = self.nodes[targets[self.draw(len(targets))].node_id]
        if order.generation == self.generation and node.spools(order.epoch):
            self._spool(node, order.epoch, order.run, (job.start.data.call, partition, number))
        else:
            job.refused[partition] += 1
        return True

    def end_job(self) -> bool:
        number, job = next(iter(self.jobs.items()), (0, None))
        if job is None or (job.left and not job.is_cancelled):
            return False
        del self.jobs[number]
        if job.is_cancelled and job.left:
            self.take(fs.JobFailed(number, RuntimeError("cancelled")))
            return True
        sizes, skipped = job.start.data.sizes, job.start.spec.skipped
        done = tuple(
            FedPartition(part, -1 if job.refused[part] or part in skipped else size)
            for part, size in enumerate(sizes)
        )
        self.take(fs.JobEnded(number, done))
        return True

    def withdraw(self) -> bool:
        if not self.asked:
            return False
        self.take(fs.Withdrawn(self.draw(len(self.asked))))
        return True

    def read(self) -> bool:
        order = [*self.nodes.values()]
        first = self.draw(len(order))
        return any(node.read() for node in (*order[first:], *order[:first]))

    def see(self) -> bool:
        while self.report():  # an agent reports its rows before what it has done
            pass
        counts = {n: node.count(self.logs_are_whole) for n, node in self.nodes.items()}
        finished = frozenset(self.finished)
        seen = (self.generation, self.is_decided, self.problem, finished, counts)
        if seen == self.seen_before:
            return False
        self.seen_before = seen
        self.progress += 1
        world = world_of(self.num_nodes, self.generation) if self.is_decided else None
        generation, world = (None, None) if self.problem else (self.generation, world)
        known: Any = {"finished": finished, "counts": counts, "progress": self.progress}
        self.take(fs.NodesSeen(fs.Nodes(generation, world, self.problem, **known)))
        return True

    def terminate(self) -> bool:
        nodes = [node for node in self.nodes.values() if node.last > node.closed_to]
        if not nodes or not self.is_decided:
            return False
        nodes[self.draw(len(nodes))].terminate()
        return True

    def restart(self) -> bool:
        """A node dies: all begin anew at the last checkpoint, at once or after a while."""
        if self.generation == 3:
            return False
        self.generation += 1
        self.is_decided = bool(self.draw(2))
        before, self.nodes = self.nodes, self._new_nodes()
        lost = self.draw(self.num_nodes)
        for node_id, node in before.items():
            if node_id != lost:
                self.nodes[node_id].retained = node.keep_for_next()
        self.finished = set()
        self.restored = Counter(self.saved)
        return True

    def lose(self) -> bool:
        """The child of one node dies, and the others continue without it."""
        if not self.is_decided:
            return False
        node_id = self.draw(self.num_nodes)
        self.nodes[node_id].closed = True
        self.finished.add(node_id)
        return True

    def shut_down(self) -> bool:
        self.problem = self.problem or FeedClosedError("the cluster was shut down")
        return True

    def give_time(self) -> bool:
        """Let a deadline pass: nodes are slow, or stand still."""
        if math.isinf(self.state.deadline_s):
            return False
        self.now_s = max(self.now_s, self.state.deadline_s)
        self.take(fs.DeadlinePassed())
        return True

    def begin_world(self) -> bool:
        was_decided, self.is_decided = self.is_decided, True
        return not was_decided

    def checkpoint(self) -> bool:
        if not self.is_decided or self.history._generation != self.generation:
            return False
        parts = [self._used(node) for node in self.nodes.values()]
        self.history.mark_covered(self.history.coverage(self.generation, parts))
        self.saved = self.model()
        return True

    def _used(self, node: SimulatedNode) -> EpochRows:
        return merge_epochs(
            {epoch: {part: ((number, number + 1),)}}
            for epoch, rows in node.used.items()
            for _, part, number in rows
        )

    # what follows

    def take(self, event: fs.Event) -> None:
        self.state, actions = step(self.state, event, self.now_s)
        for action in actions:
            if isinstance(action, fs.Send):
                if action.generation == self.generation:
                    for node_id in action.node_ids:
                        self.nodes[node_id].inbox.append(action.message)
            elif isinstance(action, fs.StartJob):
                self._start(action)
            elif isinstance(action, fs.CancelJob):
                if action.job in self.jobs:
                    self.jobs[action.job].is_cancelled = True
            elif isinstance(action, fs.Answer):
                assert action.ticket not in self.answers, "nobody is answered twice"
                self.answers[action.ticket] = action.value

    def _start(self, start: fs.StartJob) -> None:
        assert all(job.is_cancelled for job in self.jobs.values()), "each waits for the one before"
        done = start.spec.done
        left = [
            (part, number)
            for part, size in enumerate(start.data.sizes)
            for number in range(size)
            if not any(a <= number < b for a, b in done.get(part, ()))
        ]
        self.jobs[start.job] = Job(start, left, [*left])

    def model(self) -> Counter[Row]:
        used = (rows for node in self.nodes.values() for rows in node.used.values())
        return self.restored + Counter(row for rows in used for row in rows)


ORDINARY = (
    *("ask", "checkpoint", "begin_world", "end_job"),
    *("deliver_message", "bring_row", "read", "see", "fetch", "report", "wake") * 3,
)
IN_ORDER = (
    *("ask", "begin_world", "deliver_message", "fetch", "bring_row", "report", "end_job"),
    *("read", "see", "wake"),
)


def played(seed: int, *faults: str) -> Simulation:
    """Have things happen at random, then all that is left to happen, until nothing is."""
    random = Random(seed)
    simulation = Simulation(1 + random.randrange(3), random.randrange, random.random() < 0.5)
    for _ in range(random.randrange(400)):
        getattr(simulation, random.choice((*ORDINARY, *faults)))()
        simulation.now_s += 0.001
    for _ in range(10_000):
        happened = [getattr(simulation, name)() for name in IN_ORDER]
        if not any(happened):
            break
    else:
        pytest.fail(f"it never comes to rest: {simulation.state}")
    assert isinstance(simulation.state, fs.Idle), "every state has a way out"
    assert simulation.answers.keys() == simulation.asked.keys(), "nobody waits for ever"
    reading = {
        node.reading
        for node in simulation.nodes.values()
        if node.closed_to < 0 and node.node_id not in simulation.finished
    }
    assert len(reading) <= 1, "who has not terminated has read as many epochs as the others"
    return simulation


SEEDS = st.integers(0, 1 << 32)
FAULTS = ("restart", "repeat", "lose", "terminate", "give_time", "shut_down", "withdraw")


@given(SEEDS)
def test_every_row_is_used_once_an_epoch_whenever_nodes_die(seed: int) -> None:
    simulation = played(seed, "restart", "repeat")
    expected: Counter[Row] = Counter()
    for ticket, (fed, epochs) in simulation.asked.items():
        report = simulation.answers[ticket]
        if not sum(fed.sizes):
            assert "the data have no rows" in str(report)
            continue
        assert report.epochs == epochs
        assert report.rows_fed == epochs * sum(fed.sizes)
        # Of an epoch that a checkpoint covers, fewer rows than nodes wait for the next one, and
        # count as used there, which may be an epoch of the next call.
        used = report.rows_used + report.rows_unused
        assert report.rows_fed <= used < report.rows_fed + simulation.num_nodes
        assert report.rows_unused < (simulation.num_nodes if report.rows_covered else 1)
        for part, size in enumerate(fed.sizes):
            expected.update({(fed.call, part, row): epochs for row in range(size)})
    assert simulation.model() == expected


@given(SEEDS, st.sets(st.sampled_from(FAULTS)))
def test_no_row_is_used_twice_an_epoch_and_no_node_waits_ever(seed: int, faults: set[str]) -> None:
    simulation = played(seed, *sorted(faults))
    for (call, *_), times in simulation.model().items():
        assert times <= simulation.asked[call][1]
