"""The life of one feed as the driver sees it, without sockets, threads, clocks or Spark.

`step(state, event, now_s)` returns the next state and the actions that the runner has to perform.
First the handler in `TRANSITIONS` applies the event; then handlers in `LOOKS` act on the state
until nothing is left to do. A handler therefore need not consider the situation in its next state,
and a passed deadline is just a reason to look.

docs/design.md draws the transitions, from the handlers' types. A pair that is not in the table is a
bug and raises `IllegalTransitionError`. States, events and actions are in `driver/feeds/state.py`.
A step changes in place the history with its calls, and a run's table: the newest state owns them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from msgspec import structs

from sparkdl.control.messages import (
    Assign,
    EpochEnd,
    FeedBegin,
    FeedCut,
    Granted,
    ReadShare,
    SpooledRange,
    ToAgent,
)
from sparkdl.control.rows import FeedCount
from sparkdl.core.errors import ConfigError, FeedClosedError, ReadError, SparkdlError
from sparkdl.core.state_machine import stay, transition
from sparkdl.core.world import Member, World
from sparkdl.driver.feeds.coverage import Call
from sparkdl.driver.feeds.report import (
    covered_report,
    no_room,
    no_rows,
    report,
    stall_error,
    warn_of_lost,
)
from sparkdl.driver.feeds.state import (
    Action,
    Answer,
    CancelJob,
    Cutting,
    CuttingShort,
    DeadlinePassed,
    Delivering,
    Event,
    Feed,
    Idle,
    JobEnded,
    JobFailed,
    KeepProblem,
    NodesSeen,
    Opening,
    R,
    Reading,
    Requested,
    RowsSpooled,
    Run,
    S,
    Send,
    StartJob,
    State,
    Step,
    W,
    Warn,
    Withdrawn,
    added,
    with_feed,
    with_run,
)
from sparkdl.driver.feeds.table import Assigned
from sparkdl.feed.transfer.messages import FeedSpec, Target, other_rows
from sparkdl.storage.parquet.source import ParquetSource

REASON_S = 5.0
"""How long to wait for a node's failure that may explain a failed Spark job."""


def step(state: State, event: Event, now_s: float) -> Step[State]:
    after, actions = transition(TRANSITIONS, state, event, now_s)
    before, more = None, list[Action]()
    while after is not before and (more or after != before):  # an equal one has nothing to do
        before = after
        after, more = _look(before, now_s)
        actions = [*actions, *more]
    return after, actions


def _look(state: State, now_s: float) -> Step[State]:
    if not isinstance(state, Idle):
        after, actions = note_progress(state, now_s)
        if after is not state:
            return after, actions
    return LOOKS[type(state)](state, now_s)


def _then(actions: list[Action], after: Step[S]) -> Step[S]:
    return after[0], [*actions, *after[1]]


# between calls


def _look_idle(state: Idle, now_s: float) -> Step[Idle | Opening | Delivering]:
    """Feed the first call with rows for this generation; then serve requests, in order."""
    feed, nodes = state.feed, state.feed.nodes
    if nodes.problem is not None:
        actions: list[Action] = [Answer(each.ticket, nodes.problem) for each in feed.requests]
        for each in feed.requests:
            if each.call is not None:
                feed.history.mark_failed(each.call)
        return _idle(state, replace(feed, requests=()) if feed.requests else feed), actions
    if nodes.world is None:
        return _idle(state, feed), []
    generation = nodes.world.generation
    actions = warn_of_lost(feed.name, feed.history.begin(generation))
    if call := feed.history.next():  # after a restart, rows of earlier calls come first
        try:
            return _then(actions, _begin(feed, nodes.world, call, now_s))
        except SparkdlError as error:
            feed, more = _fail_call(feed, call, error)
            return Idle(feed), [*actions, *more]
    if feed.requests:
        feed, more = _serve(feed)
        return Idle(feed), [*actions, *more]
    return _idle(state, feed, generation), actions


def _idle(state: Idle, feed: Feed, generation: int = -1) -> Idle:
    """Return the same object if nothing has changed, which ends the looks."""
    is_same = feed is state.feed and generation == state.generation
    return state if is_same else Idle(feed, generation)


def _serve(feed: Feed) -> tuple[Feed, list[Action]]:
    first, *others = feed.requests
    try:
        if first.call is None:
            call = feed.history.add(first.request)
            return replace(feed, requests=(replace(first, call=call), *others)), []
        answer: Any = covered_report(first.call)
    except SparkdlError as error:
        answer = error
    return replace(feed, requests=tuple(others)), [Answer(first.ticket, answer)]


def _begin(feed: Feed, world: World, call: Call, now_s: float) -> Step[Opening | Delivering]:
    """Begin to feed the remaining rows of a call to a generation."""
    members = fed_members(world, call.request.to, feed.spec.global_batch_size)
    _check_can_be_fed(feed.name, call)
    left = tuple(call.left())
    timeout_s = call.request.timeout_s or feed.spec.timeout_s
    first = feed.history.allocate_epochs(call, [each.epoch for each in left])
    spec = replace(
        feed.spec,
        last_epoch=first + len(left) - 1,
        targets=feed_targets(members),
        timeout_s=timeout_s,
        generation=world.generation,
        partitions=call.shape.partitions,
    )
    before = feed.nodes.counts_of(member.node.node_id for member in members)
    run = Run(
        *(call, left, first, spec, members, before, call.rows_covered),
        *(first, feed.nodes.progress, now_s + timeout_s),
        rows_due=dict.fromkeys(before, 0),
    )
    if call.jobs.get(left[0].epoch):  # agents may still have rows of that job
        return _open(feed, run, now_s)
    return _then([_to_nodes(run, _beginning(run))], _deliver(feed, run))


def _open(feed: Feed, run: Run, now_s: float) -> Step[Opening]:
    begin = structs.replace(_beginning(run), run=run.call.jobs[run.now.epoch])
    return Opening(feed, run.with_table(), now_s + feed.answer_s), [_to_nodes(run, begin)]


def _beginning(run: Run) -> FeedBegin:
    retain = run.is_shuffled and run.epoch < run.last
    return FeedBegin(run.spec.feed, run.epoch, run.last, retain=retain)


def _look_opening(state: Opening, now_s: float) -> Step[Opening | Delivering]:
    counts = state.feed.nodes.active(state.run.node_ids)
    is_over = now_s >= state.deadline_s  # rows that no agent reports are brought again
    run = state.run
    if not is_over and not all(count.began >= run.epoch for count in counts.values()):
        return state, []
    after, actions = _deliver(state.feed, run, run.call.jobs[run.now.epoch])
    if state.error is not None:
        after = replace(after, error=state.error, deadline_s=now_s)
    return after, actions


# bringing the rows of an epoch


def _deliver(feed: Feed, run: Run, name: str = "") -> Step[Delivering]:
    """Bring the rows of the next epoch; of the earlier job `name` some are in the table already."""
    call, left = run.call, run.left[run.epoch - run.first :]
    if not run.is_shuffled:
        left = left[: 1 + _whole_epochs(run)]  # one pass over the data serves these
    if not name:
        run = run.with_table()
        name = f"{call.run}.{run.spec.generation}.{left[0].epoch}"
    call.jobs.update(dict.fromkeys([each.epoch for each in left], name))
    known = run.table.known
    spec = replace(
        run.spec,
        epoch=run.epoch,
        run=name,
        keep=len(left) > 1,
        done=known,
        skipped=call.covered_partitions(known) if known else frozenset(),
        digests=(call.furthest if known else {}) if feed.history.keeps else None,
    )
    run = replace(run, spec=spec)
    if spec.skipped and len(spec.skipped) == call.shape.partitions:  # all rows are in the table
        return Delivering(feed, run, run.quiet_s), []
    run = replace(run, passes=run.passes + 1)
    if isinstance(call.request.data, ParquetSource):
        return _share_out(feed, run, call.request.data)
    feed = replace(feed, last_job=feed.last_job + 1)
    head = feed.requests[0] if feed.requests else None
    ticket = head.ticket if head is not None and head.call is not None else None
    start = StartJob(feed.last_job, call.request.data, spec, ticket)
    return Delivering(feed, run, run.quiet_s, job=feed.last_job), [start]


def _share_out(feed: Feed, run: Run, source: ParquetSource) -> Step[Delivering]:
    spec = run.spec
    # Without a node the call is unwanted, as the next look finds.
    counts, done = feed.nodes.active(run.node_ids), spec.done.get(0, ())
    shares = source.shares(len(counts), done=done, in_turns=spec.in_order) if counts else ()
    is_shuffled = spec.in_order and run.call.request.shuffle is not None
    rows, nodes = spec.global_batch_size, len(run.members)
    slices = (rows, nodes) if rows and not is_shuffled else None
    actions: list[Action] = []
    for node_id, share in zip(counts, shares, strict=True):
        order = ReadShare(spec.feed, spec.epoch, share, spec.run, spec.keep, is_shuffled, slices)
        actions.append(Send(order, frozenset({node_id}), spec.generation))
    return Delivering(feed, run, run.quiet_s, num_rows={0: source.num_rows}), actions


def _look_delivering(state: Delivering, now_s: float) -> Step[Delivering | Cutting | CuttingShort]:
    """Assign rows as they come; assign the rest once agents have reported all rows."""
    feed, run = state.feed, state.run
    if run.is_unwanted or (state.error is not None and now_s >= state.deadline_s):
        error = None if run.is_unwanted else state.error
        return _then(_cancelling(state), _cut_short(feed, run, error, now_s))
    if state.error is not None:
        return state, []
    if problem := _problem(feed, run):
        return replace(state, error=problem, deadline_s=now_s), []
    if not state.job and run.table.is_complete(state.num_rows):
        rest = run.table.assign_rest([*feed.nodes.active(run.node_ids)])
        return _then(_assigning(run.spec, rest), _cut(feed, run, now_s))
    return _then(_assign(state, now_s), _watch(state, now_s))


def _cancelling(state: State) -> list[Action]:
    """The next job needs the slots of this one."""
    return [CancelJob(state.job)] if isinstance(state, Delivering) and state.job else []


def _assign(state: Delivering, now_s: float) -> list[Action]:
    run = state.run
    if not run.table.rows_waiting:  # most looks end here, at little cost
        return []
    counts = state.feed.nodes.active(run.node_ids)
    unread = {node_id: _unread(run, node_id, count) for node_id, count in counts.items()}
    return _assigning(run.spec, run.table.assign(unread, now_s))


def _unread(run: Run, node_id: int, count: FeedCount) -> int:
    """Return how many rows a node has left to read; 0 if user code waits for a row."""
    before, assigned = run.start_counts[node_id], run.table.assigned[node_id]
    read = count.given.used - before.given.used
    sent = run.sent.get(node_id, 0) + assigned
    # A node that waits is short of rows only if none of its own is still on the way.
    has_all = count.rows_received - before.rows_received >= sent
    unread = run.rows_due.get(node_id, 0) + assigned - read
    return 0 if count.is_waiting and has_all else max(0, unread)


def _assigning(spec: FeedSpec, assigned: Assigned) -> list[Action]:
    actions: list[Action] = []
    uris = {target.node_id: target.uri for target in spec.targets}
    for node_id, ranges in assigned.items():
        others = {each.holder for each in ranges} - {node_id}
        message = Assign(
            *(spec.feed, spec.epoch, spec.run, tuple(ranges)),
            uris={holder: uris[holder] for holder in sorted(others)},
            keep=spec.keep,
            in_order=spec.in_order,
        )
        actions.append(Send(message, frozenset({node_id}), spec.generation))
    return actions


def _free(
    node: int, feed: str, epoch: int, ranges: Iterable[SpooledRange], generation: int
) -> Send:
    order = Assign(feed, epoch, "", unwanted=tuple(ranges))
    return Send(order, frozenset({node}), generation)


def _problem(feed: Feed, run: Run) -> ReadError | None:
    counts = feed.nodes.active(run.node_ids)
    now = [count for count in counts.values() if count.began >= run.first]
    found = [count.problem for count in now if count.problem]
    return ReadError(f"feed {feed.name!r}: {'; '.join(found)}") if found else None


def _delivering_ended(
    state: Delivering, event: JobEnded, now_s: float
) -> Step[Delivering | CuttingShort]:
    if event.job != state.job:
        return state, []
    feed, run = state.feed, state.run
    try:
        run.spec.check_partitions(len(event.fed))
    except ConfigError as error:
        return _cut_short(feed, run, error, now_s)
    rows = {each.partition: each.num_rows for each in event.fed if each.num_rows >= 0}
    feed.history.record_shape(run.call, len(event.fed), rows)
    if not event.fed or run.call.is_empty:
        return _cut_short(feed, run, no_rows(feed.name), now_s)
    # Partitions that were refused never become complete: nodes are about to report why.
    num_rows = {p.partition: p.num_rows for p in event.fed if p.partition not in run.spec.skipped}
    return replace(state, job=0, num_rows=num_rows), []


def _delivering_failed(state: Delivering, event: JobFailed, now_s: float) -> Step[Delivering]:
    if event.job != state.job:
        return state, []
    return replace(state, job=0, error=event.error, deadline_s=now_s + event.reason_s), []


# the end of an epoch


def _cut(feed: Feed, run: Run, now_s: float) -> Step[Cutting]:
    """Make the nodes refuse further rows of the epoch, and count the received ones."""
    cut = _to_nodes(run, FeedCut(feed.name, run.epoch))
    return Cutting(feed, run, now_s + run.spec.timeout_s), [cut]


def _look_cutting(
    state: Cutting, now_s: float
) -> Step[Cutting | Delivering | Reading | CuttingShort | Idle]:
    """Once all nodes have counted, send them the epoch's length, and continue with the next one."""
    feed, run = state.feed, state.run
    cut = feed.nodes.active(run.node_ids)
    if error := state.error or _problem(feed, run):
        return _cut_short(feed, run, error, now_s)
    if any(count.cut.epoch < run.epoch for count in cut.values()):
        return _cut_short(feed, run, None, now_s) if run.is_unwanted else _watch(state, now_s)
    now, actions = run.now, list[Action]()
    has_rows = any(run.table.assigned.values()) or any(count.cut.rows for count in cut.values())
    if now.done and not has_rows:
        run = replace(run, epoch=run.epoch + 1)
        if run.epoch <= run.last:  # it is fully covered: no node sees it
            actions.append(_to_nodes(run, _beginning(run)))
        return _then(actions, _go_on(feed, run, now_s))
    rows = {node_id: count.cut.rows for node_id, count in cut.items()}
    is_whole = all(count.cut.is_whole for count in cut.values())
    stop = run.epoch + (_whole_epochs(run) if is_whole else 0)
    # A checkpoint covers the other rows of the epoch. If fewer rows than nodes are left, they come
    # first in the next epoch: a step needs one row for each node.
    is_rest = bool(now.done)
    # In a fixed order they are a batch of their own.
    waits = is_rest and not all(rows.values()) and not run.spec.in_order
    for epoch in range(run.epoch, stop + 1):
        actions.append(_mark(run, epoch, rows, again=epoch < stop, goes_on=waits))
    epochs = stop + 1 - run.epoch
    # A node that has left reports no count, so count the rows received by it.
    had = {n: _received(feed, run, n) for n in run.table.assigned if n not in rows}
    run = replace(
        run,
        refused=run.refused + sum(run.table.assigned[n] - received for n, received in had.items()),
        epoch=stop + 1,
        last_epoch_to_read=run.last_epoch_to_read if waits else stop,
        rows_due=added(run.rows_due, had, {n: count * epochs for n, count in rows.items()}),
        carried=rows if is_rest else {},
    )
    return _then(actions, _go_on(feed, run, now_s))


def _received(feed: Feed, run: Run, node_id: int) -> int:
    since = feed.nodes.counts[node_id].rows_received - run.start_counts[node_id].rows_received
    return min(run.table.assigned[node_id], max(0, since - run.sent.get(node_id, 0)))


def _go_on(feed: Feed, run: Run, now_s: float) -> Step[Delivering | Reading | CuttingShort | Idle]:
    if run.is_unwanted and run.epoch <= run.last:
        return _cut_short(feed, run, None, now_s)
    if run.is_unwanted:
        return Reading(feed, run, now_s + REASON_S), []
    if run.epoch <= run.last and not run.is_shuffled:  # while nodes still read this epoch
        return _deliver(feed, run)
    if run.last_epoch_to_read < 0 and run.epoch > run.last:
        return _finish(feed, run, None)
    return Reading(feed, run, run.quiet_s), []


def _look_reading(state: Reading, now_s: float) -> Step[Reading | Opening | CuttingShort | Idle]:
    feed, run = state.feed, state.run
    has_fed = run.epoch > run.last
    if not has_fed and (run.is_unwanted or state.error is not None):
        return _cut_short(feed, run, state.error, now_s)
    if state.error is not None or (run.is_unwanted and now_s >= state.deadline_s):
        return _finish(feed, run, state.error)
    if _has_read(feed, run):
        return _finish(feed, run, None) if has_fed else _open(feed, run, now_s)
    # Nodes that have not terminated may soon, or read the last epochs from their logs.
    return (state, []) if run.is_unwanted else _watch(state, now_s)


def _has_read(feed: Feed, run: Run) -> bool:
    inactive = feed.nodes.inactive(run.node_ids)
    # If more rows follow, the children must also have released the rows: their epoch is over.
    return all(
        node_id in inactive
        or count.given.epochs > run.last_epoch_to_read
        or count.closed_to >= run.last
        or (
            run.epoch > run.last
            and count.given.rows - run.start_counts[node_id].given.rows >= run.rows_due[node_id] > 0
        )
        for node_id, count in feed.nodes.counts_of(run.node_ids).items()
    )


# the end of a call


def _cut_short(feed: Feed, run: Run, error: Exception | None, now_s: float) -> Step[CuttingShort]:
    """End the call within an epoch: the nodes' rows of it become a shorter epoch, equal for all."""
    refused = run.refused + run.table.rows_waiting  # rows in spools stay unread
    cut = _to_nodes(run, FeedCut(feed.name, run.epoch, is_short=True))
    left, of = run.table.withdraw(), run.spec
    actions = [_free(n, of.feed, run.epoch, ranges, of.generation) for n, ranges in left.items()]
    run = replace(run, refused=refused)
    return CuttingShort(feed, run, now_s + feed.answer_s, error), [*actions, cut]


def _look_cutting_short(state: CuttingShort, now_s: float) -> Step[CuttingShort | Idle]:
    run = state.run
    cut = state.feed.nodes.active(run.node_ids)
    have_counted = all(c.cut.epoch >= run.epoch for c in cut.values())
    if now_s < state.deadline_s and not have_counted:
        return state, []
    rows = {node_id: count.cut.rows for node_id, count in cut.items()}
    # A node that has failed for good is not asked, and may have received rows.
    is_empty = have_counted and not any(rows.values()) and rows.keys() == run.node_ids
    if is_empty and state.error is not None:
        return _finish(state.feed, run, state.error)  # no node sees it: the next call skips it
    if not all(rows.values()):  # if a node has no row, no node has taken a step, nor may take one
        rows = dict.fromkeys(rows, 0)
    return _then([_mark(run, run.epoch, rows)], _finish(state.feed, run, state.error))


def _finish(feed: Feed, run: Run, error: Exception | None) -> Step[Idle]:
    actions: list[Action]
    if error is not None:
        feed, actions = _fail_call(feed, run.call, error)
        return Idle(feed), actions
    result, warning = report(feed, run)
    actions = [Warn(warning)] if warning else []
    feed.history.mark_fed(run.call, run.is_unwanted)
    head = feed.requests[0] if feed.requests else None
    # Otherwise the rows were fed again after a restart, and no call waits for them.
    if head is not None and head.call is run.call:
        actions.append(Answer(head.ticket, result))
        feed = replace(feed, requests=feed.requests[1:])
    elif result.rows_unused and not run.is_unwanted:
        actions.append(
            Warn(
                f"Feed {feed.name!r}: {result.rows_unused} replayed rows of an earlier call have "
                "not been used yet; they come first in the next epoch, if there is one"
            )
        )
    return Idle(feed), actions


def _fail_call(feed: Feed, call: Call, error: Exception) -> tuple[Feed, list[Action]]:
    """Give up a call, and answer the request for it, or for one behind it, with the error."""
    feed.history.mark_failed(call)
    head = feed.requests[0] if feed.requests else None
    if head is not None and head.call is not None:
        feed.history.mark_failed(head.call)
        return replace(feed, requests=feed.requests[1:]), [Answer(head.ticket, error)]
    return feed, [] if feed.nodes.has_failed else [KeepProblem(error)]


# what interrupts a call, whatever it is doing


def _seen(state: R, event: NodesSeen, now_s: float) -> Step[R]:
    nodes = event.nodes
    has_moved = nodes.progress != state.run.progress
    state = with_feed(state, nodes=nodes)
    if has_moved:
        quiet_s = now_s + state.run.spec.timeout_s
        state = with_run(state, progress=nodes.progress, quiet_s=quiet_s)
        is_watched = isinstance(state, Delivering | Cutting | Reading) and state.error is None
        if is_watched and not state.run.is_unwanted:
            state = replace(state, deadline_s=quiet_s)
    return state, []


def note_progress(state: R, now_s: float) -> Step[R | Idle]:
    """React to the nodes' new state and counts, in any state of the feed.

    Nodes are sent the number of rows that all of them have. A call that no node wants any more is
    marked. A call of an ended generation is left.
    """
    feed, run = state.feed, state.run
    granted = _granted(feed, run)
    if granted is not None and granted != run.granted:
        return with_run(state, granted=granted), [_to_nodes(run, granted)]
    if not run.is_unwanted and _is_unwanted(feed, run):
        if isinstance(state, Reading):
            state = replace(state, deadline_s=now_s + REASON_S)
        return with_run(state, is_unwanted=True), []
    if feed.nodes.problem is None and feed.nodes.generation == run.spec.generation:
        return state, []
    # The generation is over: the call fails, or continues with the next one.
    problem = feed.nodes.problem or (state.error if isinstance(state, CuttingShort) else None)
    left: Step[Idle] = (Idle(feed), []) if problem is None else _finish(feed, run, problem)
    return _then(_cancelling(state), left)


def _is_unwanted(feed: Feed, run: Run) -> bool:
    """Whether user code of a node has terminated this call, or all are gone."""
    nodes = feed.nodes
    counts = nodes.counts_of(run.node_ids).values()
    if nodes.world is not None and any(c.closed_to >= run.first for c in counts):
        return True
    return len(nodes.inactive(run.node_ids)) == len(run.members)


def _granted(feed: Feed, run: Run) -> Granted | None:
    """Return the number of rows that every node has of the current epoch."""
    counts = feed.nodes.active(run.node_ids).values()
    if all(count.cut.epoch >= run.epoch for count in counts):  # the epoch's end says more
        return None
    rows = min(_rows_of(count, run.epoch) for count in counts)
    return Granted(feed.name, run.epoch, rows) if rows else None


def _rows_of(count: FeedCount, epoch: int) -> int:
    if count.cut.epoch == epoch:
        return count.cut.rows
    return count.epoch_rows if count.epoch == epoch else 0


def _spooled(state: S, event: RowsSpooled, now_s: float) -> Step[S]:
    if isinstance(state, Idle):
        world, table, epoch = state.feed.nodes.world, None, 0
        generation = world.generation if world is not None else -1
    else:
        run = state.run
        generation, epoch = run.spec.generation, run.epoch
        table = run.table if isinstance(state, Opening | Delivering) else None
    actions: list[Action] = []
    error: ConfigError | None = None
    for node_id, spooled in event.reports:
        if spooled.generation != generation:  # a late report
            continue
        ranges: Iterable[SpooledRange] = spooled.ranges
        if table is not None and spooled.epoch == epoch:
            error = error or _other_rows(run, ranges)
            ranges = table.add(node_id, ranges, spooled.room_nbytes, now_s, is_full=spooled.is_full)
            if table.is_stuck:
                error = error or no_room(run, node_id)
        # Without a table of their epoch, no node reads these rows.
        if ranges := tuple(ranges):
            actions.append(_free(node_id, spooled.feed, spooled.epoch, ranges, generation))
    if error is not None and isinstance(state, Delivering) and state.error is None:
        state = replace(state, error=error, deadline_s=now_s)
    return state, actions


def _other_rows(run: Run, ranges: Iterable[SpooledRange]) -> ConfigError | None:
    """Note the digests of rows; return an error if a task that Spark repeats has sent others."""
    for each in ranges:
        if each.digest is None or run.call.note_digest(each.partition, each.digest, run.spec.run):
            continue
        return other_rows(run.spec.feed, each.partition, each.digest[0])
    return None


def _requested(state: S, event: Requested, now_s: float) -> Step[S]:
    return with_feed(state, requests=(*state.feed.requests, event.request)), []


def _withdrawn(state: S, event: Withdrawn, now_s: float) -> Step[S]:
    """End a call with an error. Nodes keep the rows that they have received."""
    feed = state.feed
    asked = next((each for each in feed.requests if each.ticket == event.ticket), None)
    if asked is None:  # it has been answered meanwhile
        return state, []
    error = FeedClosedError(f"feed {feed.name!r}: the call has been withdrawn")
    if not isinstance(state, Idle) and state.run.call is asked.call:
        is_asking = isinstance(state, Opening | CuttingShort)  # and agents are about to answer
        deadline_s = state.deadline_s if is_asking else now_s
        return replace(state, error=error, deadline_s=deadline_s), []
    if asked.call is not None:
        feed.history.mark_failed(asked.call)
    requests = tuple(each for each in feed.requests if each is not asked)
    return with_feed(state, requests=requests), [Answer(event.ticket, error)]


def _idle_seen(state: Idle, event: NodesSeen, now_s: float) -> Step[Idle]:
    return with_feed(state, nodes=event.nodes), []


# nothing moves


def _watch(state: W, now_s: float) -> Step[W]:
    if now_s < state.deadline_s:
        return state, []
    return replace(state, error=stall_error(state)), []


# small parts


def fed_members(world: World, to: str | None, batch_rows: int | None = None) -> tuple[Member, ...]:
    members = world.fed
    if to is not None:
        members = tuple(m for m in world.members if m.role.name == to and m.data_address)
    if not members:
        roles = sorted({m.role.name for m in world.members if m.data_address})
        raise ConfigError(f"role={to!r}: no such node can be fed; choose one of {roles}")
    if batch_rows is not None and set(members) < set(world.fed):
        raise ConfigError(
            f"role={to!r}: leave it out, for Feeding(global_batch_size={batch_rows}) feeds all"
        )
    return members


def feed_targets(members: Iterable[Member]) -> tuple[Target, ...]:
    return tuple(
        Target(member.node.node_id, member.node.name, member.data_address) for member in members
    )


def _to_nodes(run: Run, message: ToAgent) -> Send:
    return Send(message, run.node_ids, run.spec.generation)


def _mark(
    run: Run, epoch: int, rows: Mapping[int, int], again: bool = False, goes_on: bool = False
) -> Send:
    return _to_nodes(run, EpochEnd(run.spec.feed, epoch, dict(rows), again, goes_on))


def _whole_epochs(run: Run) -> int:
    """Return how many epochs behind the run's read the same rows again: all rows there are."""
    left = run.left[run.epoch - run.first :] if not run.is_shuffled else ()
    part = next((i for i, each in enumerate(left) if each.done), len(left))
    return max(0, part - 1)


def _check_can_be_fed(name: str, call: Call) -> None:
    """Note that a call is being fed, at most once if its data can be read only once."""
    if call.has_begun and isinstance(call.request.data, Iterator):
        kind = type(call.request.data).__name__
        raise FeedClosedError(
            f"feed {name!r}: the nodes restart, no checkpoint covers all rows of this {kind}, and "
            "it can be read only once; give a list, a table, or a DataFrame"
        )
    call.has_begun = True


LOOKS: dict[type, Callable[[Any, float], Step[State]]] = {
    Idle: _look_idle,
    Opening: _look_opening,
    Delivering: _look_delivering,
    Cutting: _look_cutting,
    Reading: _look_reading,
    CuttingShort: _look_cutting_short,
}
"""Handlers that act on a state; they return the same object if there is nothing to do."""

_IN_ANY: dict[type, Callable[[Any, Any, float], Step[Any]]] = {
    NodesSeen: _seen,
    RowsSpooled: _spooled,
    Requested: _requested,
    Withdrawn: _withdrawn,
    JobEnded: stay,
    JobFailed: stay,
    DeadlinePassed: stay,
}

TRANSITIONS: dict[tuple[type, type], Callable[[Any, Any, float], Step[State]]] = {
    **{(state, event): handler for state in LOOKS for event, handler in _IN_ANY.items()},
    (Idle, NodesSeen): _idle_seen,
    (Delivering, JobEnded): _delivering_ended,
    (Delivering, JobFailed): _delivering_failed,
}
"""Every pair of state and event; `stay`: the event is expected, and means no more than a look."""
