"""The life of one feed as the driver sees it. Pure: no sockets, threads, clocks or Spark.

Runs in: driver

    Idle ─▶ Opening ─▶ Delivering ─▶ Cutting ─▶ Reading ─▶ Idle        a call of one epoch
              restart     ▲            │
                          └─next epoch─┘

    Delivering ─▶ Explaining      the job failed, or rows were refused: a node may say why
    Delivering, Reading ─▶ Blaming      nothing moves: the log of the node that stands still
    any ─▶ CuttingShort | Holding ─▶ Idle      the call ends early, and all nodes must agree where

`step(state, event, now_s)` returns the next state and the actions that the runner has to perform.
All transitions are in `TRANSITIONS`; a pair that is not there is a bug and raises
`IllegalTransitionError`. States, events and actions are in `driver/feeds/state.py`. The book of
calls is the one object that a step changes in place: it belongs to the state that holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from msgspec import structs

from sparkdl.control.messages import (
    MAX_MESSAGE_NBYTES,
    EpochEnd,
    FeedBegin,
    FeedCount,
    FeedCut,
    FeedHold,
    Granted,
    ReadShare,
    ToAgent,
    encode,
)
from sparkdl.control.rows import num_rows
from sparkdl.core.errors import (
    ConfigError,
    FeedClosedError,
    FeedTimeoutError,
    IllegalTransitionError,
    ReadError,
    SparkdlError,
)
from sparkdl.core.world import Member, World
from sparkdl.driver.feeds.calls import Call, EpochLeft
from sparkdl.driver.feeds.report import Fed, covered_report, report
from sparkdl.driver.feeds.state import (
    Action,
    Answer,
    Blaming,
    CancelJob,
    Cutting,
    CuttingShort,
    DeadlinePassed,
    Delivering,
    Event,
    Explaining,
    Feed,
    FeedAsked,
    FetchLines,
    Holding,
    Idle,
    JobBroke,
    JobEnded,
    KeepProblem,
    LogFetched,
    NodesSeen,
    Opening,
    Reading,
    Requested,
    Run,
    Running,
    Send,
    StartJob,
    State,
    Step,
    Stream,
    StreamAsked,
    StreamStopped,
    Warn,
    added,
    with_feed,
    with_run,
)
from sparkdl.feed.parquet.source import ParquetSource
from sparkdl.feed.transfer.feeder import MAX_COUNT_S
from sparkdl.feed.transfer.messages import Target

ANSWER_S = 30.0
"""How long nodes may take to say what they have of an epoch, or which one they read."""
REASON_S = 5.0
"""How long to wait for a node's failure that may explain refused rows or a failed Spark job."""
CANCEL_S = 1.0
"""How often a job that is to end is cancelled: it may not have been known to Spark before."""
GIVE_UP_S = 60.0
"""How long a job that was cancelled is waited for."""
FETCH_S = 6.0
"""How long the log of a node that stands still is waited for."""


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


def _then(actions: list[Action], after: Step) -> Step:
    return after[0], [*actions, *after[1]]


# between calls


def _idle_seen(state: Idle, event: NodesSeen, now_s: float) -> Step:
    return _next(replace(state.feed, nodes=event.nodes), now_s)


def _idle_requested(state: Idle, event: Requested, now_s: float) -> Step:
    return _next(replace(state.feed, requests=(*state.feed.requests, event.request)), now_s)


def _idle_stopped(state: Idle, event: StreamStopped, now_s: float) -> Step:
    return _stopped(state), []


def _next(feed: Feed, now_s: float) -> Step:
    """Feed the generation the first call that it has rows to come of; serve who waits, in order."""
    nodes, actions = feed.nodes, list[Action]()
    if nodes.problem is not None:
        for request in feed.requests:
            actions.append(Answer(request.ticket, nodes.problem))
            if isinstance(request, FeedAsked) and request.call is not None:
                feed.book.broke(request.call)
        return Idle(replace(feed, requests=())), actions
    if nodes.world is None:
        return Idle(feed), []
    lost = feed.book.begin(nodes.world.generation)
    actions += _tell_lost(feed.name, lost)
    while True:
        call = feed.book.next()
        if call is not None:
            try:
                return _then(actions, _begin(feed, nodes.world, call, now_s))
            except SparkdlError as error:
                feed, told = _broke(feed, call, error)
                actions += told
        elif feed.requests:
            feed, told = _serve(feed, nodes.world)
            actions += told
        else:
            return Idle(feed, nodes.world.generation), actions


def _serve(feed: Feed, world: World) -> tuple[Feed, list[Action]]:
    """Serve the first who waits, as far as no rows have to be fed for that."""
    request, *others = feed.requests
    served = replace(feed, requests=tuple(others))
    try:
        if isinstance(request, FeedAsked):
            if request.call is None:
                entered = replace(request, call=feed.book.add(request.asked))
                return replace(feed, requests=(entered, *others)), []
            return served, [Answer(request.ticket, covered_report(request.call))]
        members = fed_members(world, request.to)
        if isinstance(request, StreamAsked):
            stream = Stream(world.generation, feed.book.open_epochs(None, []))
            begin = FeedBegin(feed.name, stream.epoch, stream.epoch)  # a `terminate()` refuses it
            said = Send(begin, _ids(members), world.generation)
            return replace(served, stream=stream), [said, Answer(request.ticket, stream)]
        ends = (Send(end, _ids(members), world.generation) for end in _stream_end(feed, members))
        return replace(served, stream=None), [*ends, Answer(request.ticket, None)]
    except SparkdlError as error:
        return served, [Answer(request.ticket, error)]


def _stream_end(feed: Feed, members: Iterable[Member]) -> Iterator[ToAgent]:
    """Return an epoch of no rows that ends the iteration. Who has terminated does not see it."""
    ids = _ids(members)
    epoch = feed.book.open_epochs(None, [0])
    # Where somebody has left, no step would find everybody: rows that wait are not used.
    is_complete = not feed.nodes.gone(ids) and not _is_stream_terminated(feed)
    yield FeedBegin(feed.name, epoch, epoch)
    yield EpochEnd(feed.name, epoch, dict.fromkeys(sorted(ids), 0) if is_complete else {})


def _begin(feed: Feed, world: World, call: Call, now_s: float) -> Step:
    """Begin to feed a generation what a call has left.

    Raises:
        ConfigError, FeedClosedError: if it cannot be fed.
    """
    members = fed_members(world, call.asked.to)
    _check_can_be_fed(feed.name, call)
    left = tuple(call.left())
    timeout_s = call.asked.timeout_s or feed.order.timeout_s
    order = replace(
        feed.order,
        epoch=feed.book.open_epochs(call, [each.epoch for each in left]),
        targets=feed_targets(members),
        timeout_s=timeout_s,
        generation=world.generation,
        partitions=call.shape.partitions,
    )
    before = feed.nodes.counts_of(_ids(members))
    run = Run(
        call,
        left,
        order,
        members,
        before,
        call.rows_covered,
        _brought_before(feed, members),
        order.epoch,
        feed.nodes.progress,
        now_s + timeout_s,
        expected=dict.fromkeys(before, 0),
    )
    begin = _beginning(run)
    said: list[Action] = [_to_nodes(run, begin)]
    if begin.run:
        return _then(said, _look_opening(Opening(feed, run, now_s + ANSWER_S), now_s))
    if run.goes_on:
        least = min(run.brought_before.values())
        ahead = {node_id: rows - least for node_id, rows in run.brought_before.items()}
        run = replace(run, ahead=ahead)
    return _then(said, _deliver(feed, run, "", now_s))


def _beginning(run: Run) -> FeedBegin:
    """Return what the nodes are told first: also which rows they may use that they still have.

    Those that the generation before was brought, and no more than are to come to each, so that all
    nodes end with equally many.
    """
    name, done = run.call.jobs.get(run.left[0].epoch, ""), run.left[0].done
    limit = 0
    if name and not isinstance(run.call.asked.data, ParquetSource):
        limit = run.call.part_of_each(done, len(run.members))
    # The epoch behind those of a stream's call ends the stream.
    begin = FeedBegin(run.order.feed, run.first, run.last + run.goes_on)
    return structs.replace(begin, run=name, done=done, limit=limit) if limit else begin


def _look_opening(state: Opening, now_s: float) -> Step:
    counts = state.feed.nodes.staying(state.run.node_ids)
    is_over = now_s >= state.deadline_s
    if not is_over and not all(count.began >= state.run.first for count in counts.values()):
        return state, []
    ahead = {node_id: count.epoch_rows for node_id, count in counts.items()}
    name = state.run.call.jobs[state.run.left[0].epoch]
    return _deliver(state.feed, replace(state.run, ahead=ahead), name, now_s)


# bringing the rows of an epoch


def _deliver(feed: Feed, run: Run, name: str, now_s: float) -> Step:
    """Have the rows of the next epoch brought.

    Args:
        name: of the job, if it brings what nodes do not have any more.
    """
    call, left = run.call, run.left[run.epoch - run.first :]
    left = left[: 1 + _whole_epochs(left)]  # what one pass over the data serves
    name = name or f"{call.run}.{run.order.generation}.{left[0].epoch}"
    call.jobs.update(dict.fromkeys([each.epoch for each in left], name))
    done = left[0].done
    order = replace(
        run.order,
        epoch=run.epoch,
        last_epoch=run.last,
        run=name,
        keep=len(left) > 1,
        done=done,
        skipped=call.covered_partitions(done) if done else frozenset(),
        ahead=run.ahead,
    )
    if isinstance(call.asked.data, ParquetSource):
        return _share_out(feed, run, order, call.asked.data, now_s)
    feed = replace(feed, last_job=feed.last_job + 1)
    state = Delivering(feed, run, order, feed.last_job, run.quiet_s)
    head = feed.requests[0] if feed.requests else None
    ticket = head.ticket if isinstance(head, FeedAsked) and head.call is not None else None
    start = StartJob(state.job, call.asked.data, order, ticket)
    return _then([start], _look(state, now_s))


def _share_out(feed: Feed, run: Run, order: Any, source: ParquetSource, now_s: float) -> Step:
    """Have each node that takes rows read its share of the files."""
    counts = feed.nodes.staying(run.node_ids)
    if not counts:
        refused = source.num_rows - num_rows({0: order.done.get(0, ())})
        run = replace(run, refused=run.refused + refused)
        return _look(Explaining(feed, run, None, {}, now_s + REASON_S), now_s)
    shares = source.shares(len(counts), done=order.done.get(0, ()))
    messages = {
        node_id: ReadShare(order.feed, order.epoch, share, order.keep)
        for node_id, share in zip(counts, shares, strict=True)
    }
    try:
        for message in messages.values():
            _check_size(message)
    except ConfigError as error:
        return _end_early(feed, run, error, now_s)
    received = {node_id: count.rows_received for node_id, count in counts.items()}
    state = Delivering(feed, run, order, 0, run.quiet_s, messages, received)
    said = [Send(m, frozenset({n}), order.generation) for n, m in messages.items()]
    return _then([*said], _look(state, now_s))


def _look_delivering(state: Delivering, now_s: float) -> Step:
    """Go on once all nodes have read their shares, or end a job that nobody wants."""
    feed, run = state.feed, state.run
    if state.job:
        if not run.is_unwanted:
            return state, []
        if now_s < run.counts_until_s:  # feeders count the rows that are left
            return replace(state, deadline_s=run.counts_until_s), []
        return _cancel(with_run(state, is_cut=True), None, now_s)
    staying = feed.nodes.staying(state.shares)
    through = {n: c for n, c in staying.items() if c.read_to == state.order.epoch}
    for node_id, count in through.items():
        if count.read_problem:
            name = _name(run, node_id)
            text = f"{name} could not read its share: {count.read_problem}"
            return _end_early(feed, run, ReadError(text), now_s)
    if len(through) < len(staying) and not run.is_unwanted:
        return state, []
    counts = feed.nodes.counts_of(state.shares)
    refused = sum(
        share.share.num_rows - (counts[node_id].rows_received - state.received[node_id])
        for node_id, share in state.shares.items()
        if node_id not in staying
    )
    run = replace(run, refused=run.refused + refused)
    return _end_early(feed, run, None, now_s) if run.is_unwanted else _cut(feed, run, {}, now_s)


def _cancel(state: Delivering, error: Exception | None, now_s: float) -> Step:
    """End the job; what follows waits for that, since the next one needs its slots."""
    if state.is_cancelled:
        return replace(state, error=state.error or error), []
    after = replace(state, error=error, deadline_s=now_s + CANCEL_S, gives_up_s=now_s + GIVE_UP_S)
    return after, [CancelJob(state.job)]


def _delivering_ended(state: Delivering, event: JobEnded, now_s: float) -> Step:
    if event.job != state.job:
        return state, []
    feed, run = state.feed, state.run
    if not run.is_unwanted and state.error is None:
        try:
            state.order.check_partitions(len(event.fed))
        except ConfigError as error:
            return _end_early(feed, run, error, now_s)
        rows = {each.partition: each.num_rows for each in event.fed if each.num_rows >= 0}
        feed.book.measured(run.call, len(event.fed), rows)
    brought = added(*(each.rows for each in event.fed))
    refused = sum(each.rows_refused for each in event.fed)
    state = replace(state, run=replace(run, refused=run.refused + refused))
    if after := _after_job(state, now_s):
        return after
    if refused:  # and the nodes are about to tell why
        return Explaining(feed, state.run, None, brought, now_s + REASON_S), []
    return _cut(feed, state.run, brought, now_s)


def _delivering_broke(state: Delivering, event: JobBroke, now_s: float) -> Step:
    if event.job != state.job:
        return state, []
    if after := _after_job(state, now_s):
        return after
    if event.is_of_data:
        return _end_early(state.feed, state.run, event.error, now_s)
    # A node that cannot be reached is known to be lost after its lease at the latest.
    wait_s = state.feed.reason_s if event.is_cut_off else REASON_S
    return Explaining(state.feed, state.run, event.error, {}, now_s + wait_s), []


def _after_job(state: Delivering, now_s: float) -> Step | None:
    """Return what follows a job that was to end, or that makes no sense any more."""
    feed, run = state.feed, state.run
    if _is_pointless(feed, run):
        return _leave(feed, run, now_s)
    if state.error is not None or run.is_unwanted:
        return _end_early(feed, run, state.error, now_s)
    return None


def _delivering_expired(state: Delivering, event: DeadlinePassed, now_s: float) -> Step:
    if now_s < state.deadline_s:
        return state, []
    if now_s >= state.gives_up_s:
        after = _after_job(state, now_s)
        assert after is not None
        return _then([Warn(f"Feed {state.feed.name!r}: its Spark job does not end")], after)
    if state.is_cancelled:
        return replace(state, deadline_s=now_s + CANCEL_S), [CancelJob(state.job)]
    if state.run.is_unwanted:
        return _look_delivering(state, now_s)
    return _blame(state, now_s)


def _look_explaining(state: Explaining, now_s: float) -> Step:
    feed, run = state.feed, state.run
    if run.is_unwanted:
        return _end_early(feed, run, None, now_s)
    if now_s < state.deadline_s:
        return state, []
    if state.error is not None:
        return _end_early(feed, run, state.error, now_s)
    return _cut(feed, run, state.brought, now_s)


# the end of an epoch


def _cut(feed: Feed, run: Run, brought: Mapping[int, int], now_s: float) -> Step:
    """Have the nodes take no more rows of the epoch, and count them."""
    run = replace(run, passes=run.passes + 1)
    cut = _to_nodes(run, FeedCut(feed.name, run.epoch))
    return _then([cut], _look_cutting(Cutting(feed, run, brought, now_s + ANSWER_S), now_s))


def _look_cutting(state: Cutting, now_s: float) -> Step:
    """Once all have counted, tell them how long the epoch is; go on with the next one."""
    feed, run = state.feed, state.run
    cut = feed.nodes.staying(run.node_ids)
    silent = [node_id for node_id, count in cut.items() if count.cut < run.epoch]
    if silent and now_s >= state.deadline_s:
        names = ", ".join(_name(run, node_id) for node_id in silent)
        error = FeedTimeoutError(
            f"the agent of {names} did not say within {ANSWER_S:g} s how many rows of feed "
            f"{feed.name!r} it has; its host may be overloaded, or the network cut"
        )
        return _end_early(feed, run, error, now_s)
    if silent:
        return state, []
    now, said = run.left[run.epoch - run.first], list[Action]()
    if now.done and not any(count.cut_rows for count in cut.values()):
        run = replace(run, epoch=run.epoch + 1)
        if run.epoch <= run.last:  # nothing was left of it: nobody is to see it
            said.append(_to_nodes(run, FeedBegin(feed.name, run.epoch, run.last + run.goes_on)))
        return _then(said, _go_on(feed, run, now_s))
    rows = {node_id: count.cut_rows for node_id, count in cut.items()}
    is_whole = all(count.cut_whole for count in cut.values())
    stop = run.epoch + (_whole_epochs(run.left[run.epoch - run.first :]) if is_whole else 0)
    # A checkpoint covers the other rows of the epoch. If fewer than there are nodes are left, they
    # come first in the next epoch, as in a stream: a step needs one each.
    is_rest = bool(now.done)
    waits = is_rest and not all(rows.values())
    for epoch in range(run.epoch, stop + 1):
        said.append(_mark(run, epoch, rows, again=epoch < stop, goes_on=waits))
    epochs = stop + 1 - run.epoch
    had = {n: brought for n, brought in state.brought.items() if n not in rows}  # by who is gone
    run = replace(
        run,
        epoch=stop + 1,
        read_to=run.read_to if waits else stop,
        expected=added(run.expected, had, {n: count * epochs for n, count in rows.items()}),
        ahead=rows if is_rest else {},
        repeated=(run.epoch, rows) if epochs > 1 else None,
    )
    return _then(said, _go_on(feed, run, now_s))


def _go_on(feed: Feed, run: Run, now_s: float) -> Step:
    if run.is_unwanted:
        return _end_early(feed, run, None, now_s)
    if run.epoch <= run.last:
        return _deliver(feed, run, "", now_s)
    if run.read_to < 0:
        return _finish(feed, run, None, now_s)
    return _look_reading(Reading(feed, run, run.quiet_s), now_s)


def _look_reading(state: Reading, now_s: float) -> Step:
    feed, run = state.feed, state.run
    if run.is_unwanted:
        return _end_early(feed, run, None, now_s)
    return _finish(feed, run, None, now_s) if _has_read(feed, run) else (state, [])


def _has_read(feed: Feed, run: Run) -> bool:
    """Whether every node has read all that it was fed, or takes no more.

    A stream does not wait until it has brought each node a row: a node without one may wait for it
    to learn the types of the columns, and the others may wait for that node.
    """
    gone = feed.nodes.gone(run.node_ids)
    if run.goes_on and any(
        node_id not in gone and not run.brought_before.get(node_id, 0) + rows
        for node_id, rows in run.expected.items()
    ):
        return True
    return all(
        node_id in gone
        or count.epochs_done > run.read_to
        or count.rows_consumed - run.before[node_id].rows_consumed >= run.expected[node_id] > 0
        for node_id, count in feed.nodes.counts_of(run.node_ids).items()
    )


# the end of a call


def _end_early(feed: Feed, run: Run, error: Exception | None, now_s: float) -> Step:
    """End the call as it is.

    What the nodes have of an epoch that is being fed is an epoch, of as many steps for each. If all
    have been fed, and are read from the logs, the one that any node is reading is the last.
    """
    if _is_pointless(feed, run):
        return _leave(feed, run, now_s, error)
    if run.epoch <= run.last:
        cut = _to_nodes(run, FeedCut(feed.name, run.epoch))
        short = CuttingShort(feed, run, error, now_s + ANSWER_S)
        return _then([cut], _look_cutting_short(short, now_s))
    if run.repeated is not None:
        hold = _to_nodes(run, FeedHold(feed.name, run.last))
        return _then([hold], _look_holding(Holding(feed, run, error, now_s + ANSWER_S), now_s))
    return _finish(feed, run, error, now_s)


def _look_cutting_short(state: CuttingShort, now_s: float) -> Step:
    run = state.run
    cut = state.feed.nodes.staying(run.node_ids)
    if now_s < state.deadline_s and not all(c.cut >= run.epoch for c in cut.values()):
        return state, []
    rows = {node_id: count.cut_rows for node_id, count in cut.items()}
    if not all(rows.values()):  # where a node has no row, none has taken a step, and none is to
        rows = dict.fromkeys(rows, 0)
    mark = _mark(run, run.epoch, rows)
    return _then([mark], _finish(state.feed, run, state.error, now_s))


def _look_holding(state: Holding, now_s: float) -> Step:
    run = state.run
    told = state.feed.nodes.staying(run.node_ids)
    has_told = [c.held == run.last or c.closed_to >= run.last for c in told.values()]
    if now_s < state.deadline_s and not all(has_told):
        return state, []
    assert run.repeated is not None
    first, rows = run.repeated
    reading = [c.reading for c in told.values() if c.held == run.last and c.closed_to < run.last]
    mark = _mark(run, min(run.last, max([first, *reading])), rows)
    return _then([mark], _finish(state.feed, run, state.error, now_s))


def _finish(feed: Feed, run: Run, error: Exception | None, now_s: float) -> Step:
    """Tell what became of the call; go on with the next one."""
    said: list[Action]
    if error is not None:
        feed, said = _broke(feed, run.call, error)
        return _then(said, _next(feed, now_s))
    fed = Fed(
        feed.name,
        epochs=run.call.asked.epochs - len(run.left) + min(run.epoch, run.last + 1) - run.first,
        passes=run.passes,
        rows_refused=run.refused,
        delivered={} if run.is_unwanted else run.expected,
        rows_covered=run.covered,
        goes_on=run.goes_on and not run.is_unwanted,
        is_cut=run.is_cut and run.epoch <= run.last,
        left_by=feed.nodes.gone(run.node_ids),
    )
    names = {member.node.node_id: member.node.name for member in run.members}
    told, warning = report(fed, names, run.before, feed.nodes.counts_of(run.node_ids))
    said = [Warn(warning)] if warning else []
    feed.book.fed(run.call, run.is_unwanted)
    feed = _note_brought(feed, run, told.rows)
    head = feed.requests[0] if feed.requests else None
    if isinstance(head, FeedAsked) and head.call is run.call:
        said.append(Answer(head.ticket, told))
        feed = replace(feed, requests=feed.requests[1:])
    elif told.rows_unused and not run.is_unwanted:
        said.append(
            Warn(
                f"Feed {feed.name!r}: {told.rows_unused} rows of an earlier call, which were fed "
                "again after a restart, have not been used yet; they come first in the next "
                "epoch, if there is one"
            )
        )
    return _then(said, _next(feed, now_s))


def _broke(feed: Feed, call: Call, error: Exception) -> tuple[Feed, list[Action]]:
    """Give up a call; who waits for it, or for one behind it, is told."""
    feed.book.broke(call)
    head = feed.requests[0] if feed.requests else None
    if isinstance(head, FeedAsked) and head.call is not None:
        feed.book.broke(head.call)
        return replace(feed, requests=feed.requests[1:]), [Answer(head.ticket, error)]
    return feed, [] if feed.nodes.has_failed else [KeepProblem(error)]


# what interrupts a call, whatever it is doing


def _seen(state: Any, event: NodesSeen, now_s: float) -> Step:
    """Take what is known of the nodes now, and look what follows from it."""
    nodes = event.nodes
    state = with_feed(state, nodes=nodes)
    if nodes.progress != state.run.progress:
        quiet_s = now_s + state.run.order.timeout_s
        state = with_run(state, progress=nodes.progress, quiet_s=quiet_s)
        if isinstance(state, Reading) or (isinstance(state, Delivering) and not state.is_cancelled):
            state = replace(state, deadline_s=quiet_s)
    return _look(state, now_s)


def _look(state: Any, now_s: float) -> Step:
    """Do what is to be done at `state` as things are now."""
    feed, run = state.feed, state.run
    said = list[Action]()
    granted = _granted(feed, run)
    if granted is not None and granted != run.granted:
        run = replace(run, granted=granted)
        said.append(_to_nodes(run, granted))
    if not run.is_unwanted and _is_unwanted(feed, run):
        # Why all nodes have returned nobody knows, and who feeds is told of what is left.
        has_left = len(feed.nodes.gone(run.node_ids)) == len(run.members) and not run.goes_on
        until_s = now_s + MAX_COUNT_S if has_left else now_s
        run = replace(run, is_unwanted=True, counts_until_s=until_s)
    state = replace(state, run=run)
    if _is_pointless(feed, run):
        if isinstance(state, Blaming):
            state = replace(state.before, feed=feed, run=run)
        error = state.error if isinstance(state, CuttingShort | Holding) else None
        if not isinstance(state, Delivering) or not state.job:
            return _then(said, _leave(feed, run, now_s, error))
        if feed.nodes.problem is None:  # the next generation's job needs the slots of this one
            return _then(said, _cancel(state, None, now_s))
        return _then([*said, CancelJob(state.job)], _leave(feed, run, now_s))
    if isinstance(state, Blaming):
        if not run.is_unwanted:
            return state, said
        state = replace(state.before, feed=feed, run=run)
    return _then(said, _LOOKS[type(state)](state, now_s))


def _leave(feed: Feed, run: Run, now_s: float, error: Exception | None = None) -> Step:
    """End a run whose generation is over: the call fails, or goes on with the next generation."""
    problem = feed.nodes.problem or error
    if problem is not None:
        return _finish(feed, run, problem, now_s)
    return _next(feed, now_s)


def _is_pointless(feed: Feed, run: Run) -> bool:
    """Whether the cluster cannot be fed any more, or another generation begins."""
    return feed.nodes.problem is not None or feed.nodes.generation != run.order.generation


def _is_unwanted(feed: Feed, run: Run) -> bool:
    """Whether user code of a node has terminated this call or its stream, or all are gone."""
    nodes = feed.nodes
    if run.goes_on and (
        feed.stream is None or feed.stream.is_stopped or _is_stream_terminated(feed)
    ):
        return True
    counts = nodes.counts_of(run.node_ids).values()
    if nodes.world is not None and any(c.closed_to >= run.first for c in counts):
        return True
    return len(nodes.gone(run.node_ids)) == len(run.members)


def _is_stream_terminated(feed: Feed) -> bool:
    """Whether user code of a node has called `terminate()` since the stream began."""
    stream, nodes = feed.stream, feed.nodes
    if stream is None or nodes.world is None:
        return False
    first = stream.epoch if nodes.generation == stream.generation else 0
    return any(count.closed_to >= first for count in nodes.counts.values())


def is_stream_over(feed: Feed) -> bool:
    """Whether no more micro-batches are wanted."""
    return feed.stream is None or feed.stream.is_stopped or _is_stream_terminated(feed)


def _granted(feed: Feed, run: Run) -> Granted | None:
    """Return the rows that every node has of the epoch that is being fed."""
    counts = feed.nodes.staying(run.node_ids).values()
    if len({count.epoch for count in counts}) != 1:
        return None
    epoch, rows = next(iter(counts)).epoch, min(count.epoch_rows for count in counts)
    return Granted(feed.name, epoch, rows) if rows else None


def _stopped(state: Any) -> Any:
    stream = state.feed.stream
    return state if stream is None else with_feed(state, stream=replace(stream, is_stopped=True))


def _running_stopped(state: Running, event: StreamStopped, now_s: float) -> Step:
    return _look(_stopped(state), now_s)


def _running_requested(state: Running, event: Requested, now_s: float) -> Step:
    return with_feed(state, requests=(*state.feed.requests, event.request)), []


def _running_expired(state: Running, event: DeadlinePassed, now_s: float) -> Step:
    return _LOOKS[type(state)](state, now_s) if now_s >= state.deadline_s else (state, [])


# nothing moves


def _reading_expired(state: Reading, event: DeadlinePassed, now_s: float) -> Step:
    return _blame(state, now_s) if now_s >= state.deadline_s else (state, [])


def _blame(state: Delivering | Reading, now_s: float) -> Step:
    """Ask for the last words of the node that stands still."""
    node_id = _slowest(state.feed, state.run)
    blaming = Blaming(state.feed, state.run, state, node_id, now_s + FETCH_S)
    return blaming, [FetchLines(node_id)]


def _slowest(feed: Feed, run: Run) -> int:
    counts = feed.nodes.counts_of(run.node_ids)
    behind = {n: c for n, c in counts.items() if c.rows_consumed < c.rows_received and not c.closed}
    return min(behind or counts, key=lambda n: counts[n].rows_consumed)


def _blaming_fetched(state: Blaming, event: LogFetched, now_s: float) -> Step:
    if event.node_id != state.node_id:
        return state, []
    count: FeedCount = state.feed.nodes.counts_of([state.node_id])[state.node_id]
    name = _name(state.run, state.node_id)
    tail = "".join(f"\n  | {line}" for line in event.lines) or " (nothing)"
    error = FeedTimeoutError(
        f"feed {state.feed.name!r} made no progress for {state.run.order.timeout_s:g} s: {name} "
        f"has read {count.rows_consumed} rows in {count.steps} steps, and received "
        f"{count.rows_received}. Raise feed_timeout if a step may take longer; otherwise see "
        f"what it waits for{event.unfed and f' ({event.unfed})'}. Last log lines of {name}:{tail}"
    )
    before: Delivering | Reading = replace(state.before, feed=state.feed, run=state.run)
    if isinstance(before, Delivering) and before.job:
        return _cancel(before, error, now_s)
    return _end_early(state.feed, state.run, error, now_s)


def _blaming_expired(state: Blaming, event: DeadlinePassed, now_s: float) -> Step:
    if now_s < state.deadline_s:
        return state, []
    return _blaming_fetched(state, LogFetched(state.node_id, ()), now_s)


def _blaming_job(state: Blaming, event: JobEnded | JobBroke, now_s: float) -> Step:
    """Something has moved after all."""
    return step(replace(state.before, feed=state.feed, run=state.run), event, now_s)


# small parts


def fed_members(world: World, to: str | None) -> tuple[Member, ...]:
    """Return the nodes that are fed: those of a role, or those that train.

    Raises:
        ConfigError: if there are none.
    """
    members = world.fed
    if to is not None:
        members = tuple(m for m in world.members if m.role.name == to and m.data_address)
    if not members:
        roles = sorted({m.role.name for m in world.members if m.data_address})
        raise ConfigError(f"to={to!r}: no such node can be fed; choose one of {roles}")
    return members


def feed_targets(members: Iterable[Member]) -> tuple[Target, ...]:
    """Return where feeders find the nodes."""
    return tuple(
        Target(member.node.node_id, member.node.name, member.data_address) for member in members
    )


def _ids(members: Iterable[Member]) -> frozenset[int]:
    return frozenset(member.node.node_id for member in members)


def _name(run: Run, node_id: int) -> str:
    return next(m.node.name for m in run.members if m.node.node_id == node_id)


def _to_nodes(run: Run, message: ToAgent) -> Send:
    return Send(message, run.node_ids, run.order.generation)


def _mark(
    run: Run, epoch: int, rows: Mapping[int, int], again: bool = False, goes_on: bool = False
) -> Send:
    end = EpochEnd(run.order.feed, epoch, dict(rows), again, goes_on or run.goes_on)
    return _to_nodes(run, end)


def _whole_epochs(left: tuple[EpochLeft, ...]) -> int:
    """Return how many epochs behind the first read the same rows: all of them."""
    part = next((i for i, each in enumerate(left) if each.done), len(left))
    return max(0, part - 1)


def _brought_before(feed: Feed, members: Iterable[Member]) -> dict[int, int]:
    """Return the rows by node id that the stream has brought in this generation."""
    rows: Mapping[str, int] = {}
    if feed.stream is not None and feed.nodes.generation is not None:
        rows = feed.stream.brought.get(feed.nodes.generation, {})
    return {member.node.node_id: rows.get(member.node.name, 0) for member in members}


def _note_brought(feed: Feed, run: Run, rows: Mapping[str, int]) -> Feed:
    if feed.stream is None or not run.goes_on:
        return feed
    generation, brought = run.order.generation, dict(feed.stream.brought)
    brought[generation] = added(brought.get(generation, {}), rows)
    return replace(feed, stream=replace(feed.stream, brought=brought))


def _check_can_be_fed(name: str, call: Call) -> None:
    """Note that a call is being fed, once at most if its data can be read once.

    Raises:
        FeedClosedError: if it was, and there are rows that no checkpoint covers.
    """
    if call.has_begun and isinstance(call.asked.data, Iterator):
        kind = type(call.asked.data).__name__
        raise FeedClosedError(
            f"feed {name!r}: the nodes begin anew, and a {kind}, whose rows no checkpoint covers "
            "as a whole, cannot be fed again; give a list, a table, or a DataFrame"
        )
    call.has_begun = True


def _check_size(message: ReadShare) -> None:
    nbytes = len(encode(message))
    if nbytes > MAX_MESSAGE_NBYTES:
        files, ranges = len(message.share.files), len(message.share.ranges)
        raise ConfigError(
            f"a node's share, {ranges} row groups in {files} files, takes {nbytes} bytes to tell, "
            f"and {MAX_MESSAGE_NBYTES} are allowed. Write fewer and larger files (row groups of "
            "some 100 MB), feed a part of the files at a time, or use more nodes"
        )


def _tell_lost(name: str, calls: list[Call]) -> list[Action]:
    rows = sum(max(0, sum(call.shape.rows.values()) - call.rows_covered) for call in calls)
    if not rows:
        return []
    return [
        Warn(
            f"Feed {name!r}: the nodes begin anew at their last checkpoint. Since then they have "
            f"had {rows} rows in {len(calls)} micro-batches of a stream, which are lost to the "
            "model: Spark does not bring them again. Make checkpoints more often where that matters"
        )
    ]


_LOOKS: dict[type, Callable[..., Step]] = {
    Opening: _look_opening,
    Delivering: _look_delivering,
    Explaining: _look_explaining,
    Cutting: _look_cutting,
    Reading: _look_reading,
    CuttingShort: _look_cutting_short,
    Holding: _look_holding,
}

_IN_ANY: dict[type, Callable[..., Step]] = {
    NodesSeen: _seen,
    Requested: _running_requested,
    StreamStopped: _running_stopped,
    JobEnded: _stay,
    JobBroke: _stay,
    LogFetched: _stay,
    DeadlinePassed: _running_expired,
}

TRANSITIONS: dict[tuple[type, type], Callable[..., Step]] = {
    (Idle, NodesSeen): _idle_seen,
    (Idle, Requested): _idle_requested,
    (Idle, StreamStopped): _idle_stopped,
    (Idle, JobEnded): _stay,
    (Idle, JobBroke): _stay,
    (Idle, LogFetched): _stay,
    (Idle, DeadlinePassed): _stay,
    **{(state, event): handler for state in _LOOKS for event, handler in _IN_ANY.items()},
    **{(Blaming, event): handler for event, handler in _IN_ANY.items()},
    (Delivering, JobEnded): _delivering_ended,
    (Delivering, JobBroke): _delivering_broke,
    (Delivering, DeadlinePassed): _delivering_expired,
    (Reading, DeadlinePassed): _reading_expired,
    (Blaming, JobEnded): _blaming_job,
    (Blaming, JobBroke): _blaming_job,
    (Blaming, LogFetched): _blaming_fetched,
    (Blaming, DeadlinePassed): _blaming_expired,
}
