"""Reports of feeds: the use of a call's rows, errors and warnings. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sparkdl.control.rows import FeedCount
from sparkdl.core.errors import ConfigError, FeedTimeoutError
from sparkdl.core.spec import ClusterSpec
from sparkdl.core.texts import did_you_mean, listed
from sparkdl.driver.feeds.coverage import Call
from sparkdl.driver.feeds.fixed_order import OrderedTable
from sparkdl.driver.feeds.state import Action, Cutting, Delivering, Feed, Reading, Run, Warn


@dataclass(frozen=True)
class FeedReport:
    """The use of the rows of one `feed` call. A row counts once for each epoch.

    Attributes:
        epochs: fed completely. If the nodes wanted no more before the end, used completely.
        rows: rows delivered, by node name, since the last restart.
        steps: batches given to user code, by node name, since the last restart; 0 by single rows.
        rows_used: rows that user code was given, `rows_covered` among them.
        rows_padded: rows given a second time to fill a step, see `tail` of `ctx.batches`. Like
            `rows_dropped` and `passes` it counts since the last restart.
        rows_dropped: rows left out because they did not fill a step.
        rows_unused: rows that no node wanted, that were received but not read, or of epochs that no
            node has read. Rows that Spark has not sent when no node needs more are not counted; a
            log line says so.
        passes: how many times the data has been read; further epochs came from the nodes' logs.
        rows_covered: rows fed before a restart or in an earlier run, and covered by the checkpoint
            that the training resumed from.
        rows_again: rows given in loops that were left early, after which the epoch began again; not
            part of `rows_used`. Batches read ahead, and those that Keras inspects, count.
    """

    epochs: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    rows_used: int = 0
    rows_padded: int = 0
    rows_dropped: int = 0
    rows_unused: int = 0
    passes: int = 0
    rows_covered: int = 0
    rows_again: int = 0

    @property
    def rows_fed(self) -> int:
        """Rows delivered to all nodes, each once: `rows_covered`, and `rows` of all nodes."""
        return self.rows_covered + sum(self.rows.values())


def report(feed: Feed, run: Run) -> tuple[FeedReport, str]:
    """Return the report of a call, from the nodes' counts before and after it.

    The second value is a warning about unused rows; empty if there are none.
    """
    names = {member.node.node_id: member.node.name for member in run.members}
    before, after = run.start_counts, feed.nodes.counts_of(names)
    call = run.call

    given = {node_id: after[node_id].given - before[node_id].given for node_id in names}

    def total(field_: str) -> int:
        return sum(max(0, int(getattr(each, field_))) for each in given.values())

    rows, unread = {}, {}
    for node_id, name in names.items():
        received = after[node_id].rows_received - before[node_id].rows_received
        read = given[node_id].used
        # A call also reads rows carried over from an earlier one, so `read` may be larger.
        rows[name] = max(received, read if run.is_unwanted else run.rows_due.get(node_id, read))
        unread[node_id] = max(0, rows[name] - read)
    used = total("rows") + total("dropped")
    unused = max(run.refused + sum(unread.values()), run.rows - used)
    epochs = call.request.epochs - len(run.left) + min(run.epoch, run.last + 1) - run.first
    is_short = run.is_unwanted and run.rows > 0
    if is_short:  # epochs read from logs: which ones began is unknown
        epochs = min(epochs, (run.covered + used) // sum(call.shape.rows.values()))
    left_by = feed.nodes.inactive(names)
    is_unknown = run.is_unwanted and not run.rows and run.epoch <= run.last
    warning = ""
    if (unused or (is_unknown and names.keys() <= left_by)) and not (
        call.request.is_micro_batch and not run.is_unwanted  # more of the stream is to come
    ):
        enough = [
            name
            for node_id, name in names.items()
            if node_id in left_by or after[node_id].closed_to >= run.first
        ]
        why = "too few for a step on every node"
        if enough:
            why = f"map_fun has returned or called terminate() on {listed(enough)}"
        many = f"{'at least ' * is_unknown}{unused} " * bool(unused)
        warning = f"Feed {feed.name!r}: {many}rows were not used: {why}"
        if is_short and epochs < call.request.epochs > 1:
            warning += f". {epochs} of {call.request.epochs} epochs were used"
    steps = {name: given[node_id].steps for node_id, name in names.items()}
    result = FeedReport(
        *(epochs, rows, steps),
        *(run.covered + total("rows"), total("padded"), total("dropped")),
        *(unused, run.passes, run.covered, total("again")),
    )
    return result, warning


def no_rows(feed: str) -> ConfigError:
    return ConfigError(
        f"feed {feed!r}: the data have no rows, so there is nothing to train on. Check the filter, "
        "the partition or the path that the data come from (df.count())"
    )


def covered_report(call: Call) -> FeedReport:
    covered = call.rows_covered
    return FeedReport(call.request.epochs, rows_used=covered, rows_covered=covered)


def stalled_waits(spec: ClusterSpec, feeds: Mapping[tuple[int, str], FeedCount]) -> str:
    """Return a text about the feeds read but never fed; empty if there are none."""
    unfed: dict[str, list[str]] = {}
    fed: dict[str, list[str]] = {}
    for (node_id, feed), count in sorted(feeds.items()):
        if count.began >= 0 or count.rows_received:
            fed.setdefault(feed, []).append(spec.nodes[node_id].name)
        elif not count.closed:
            unfed.setdefault(feed, []).append(spec.nodes[node_id].name)
    if not unfed:
        return ""
    named = ", ".join(f"{feed!r} on {listed(nodes)}" for feed, nodes in unfed.items())
    others = ", ".join(f"{feed!r} to {listed(nodes)}" for feed, nodes in sorted(fed.items()))
    near = "".join(did_you_mean(feed, fed) for feed in unfed if feed not in fed)
    return (
        f"map_fun waits for rows that the driver has not fed: {named}. The driver has fed "
        f"{others or 'nothing'}{near or '.'} Give feed= of cluster.feed(…) and of ctx.batches(…) "
        "the same name, and role= where nodes of another role read; feed several at once with "
        "cluster.feed_async, and all before cluster.wait()"
    )


def reads_extra_epochs(
    node: str, now: FeedCount, feeds: Mapping[tuple[int, str], FeedCount]
) -> str | None:
    if not now.given.extra_epochs or any(
        c.given.extra_epochs for (_, feed), c in feeds.items() if feed == now.feed
    ):
        return None
    return (
        f"feed {now.feed!r} has ended, but map_fun on {node} loops over another epoch, which has "
        "no batches. Give cluster.feed(epochs=…) as many epochs as map_fun loops over, or loop "
        f"`while ctx.has_epoch({now.feed!r})`; to validate, feed the validation rows as another "
        "feed: cluster.feed_async(rows, epochs=…, feed='validation')"
    )


def stall_error(state: Delivering | Cutting | Reading) -> FeedTimeoutError:
    counts = state.feed.nodes.counts_of(state.run.node_ids)
    # A node with unread rows stands still itself. The others may be waiting for it.
    behind = {n: c for n, c in counts.items() if c.given.rows < c.rows_received and not c.closed}
    node_id = min(behind or counts, key=lambda n: counts[n].given.rows)
    count = counts[node_id]
    name = next(m.node.name for m in state.run.members if m.node.node_id == node_id)
    is_job = isinstance(state, Delivering) and state.job
    has_rows = state.run.table.has_rows or any(each.rows_received for each in counts.values())
    if is_job and not has_rows:
        return FeedTimeoutError(
            f"feed {state.feed.name!r}: its Spark job has brought no row to any node for "
            f"{state.run.spec.timeout_s:g} s. It still computes the rows, or waits for a task slot "
            "that nodes or other jobs hold: look at it in the Spark UI. Raise the timeout of the "
            "feed in the first case; in the second add executors or cores, or launch with "
            "Startup(placement='detached')"
        )
    table = state.run.table
    if isinstance(state, Delivering) and isinstance(table, OrderedTable) and table.rows_waiting:
        return FeedTimeoutError(
            f"feed {state.feed.name!r}: {table.rows_waiting} rows wait for others that come "
            f"first in the fixed order and have not come for {state.run.spec.timeout_s:g} s. Raise "
            "Feeding(memory_nbytes=…, disk_nbytes=…), or see in the Spark UI why its job waits"
        )
    return FeedTimeoutError(
        f"feed {state.feed.name!r} made no progress for {state.run.spec.timeout_s:g} s: {name} "
        f"has read {count.given.rows} rows in {count.given.steps} steps, and received "
        f"{count.rows_received}. Raise the feed's timeout if a step may take longer; otherwise "
        "see what it waits for (cluster.logs, cluster.stacks, the log's warnings)"
    )


def no_room(run: Run, node_id: int) -> ConfigError:
    name = next(m.node.name for m in run.members if m.node.node_id == node_id)
    return ConfigError(
        f"feed {run.spec.feed!r}: the rows of {name} take more than its memory and disk for feeds, "
        "where shuffle='global' in a fixed order lets them wait for all others. Raise Feeding("
        "memory_nbytes=…, disk_nbytes=…), use more nodes, or leave shuffle out"
    )


def warn_of_lost(name: str, calls: list[Call]) -> list[Action]:
    rows = sum(max(0, sum(call.shape.rows.values()) - call.rows_covered) for call in calls)
    if not rows:
        return []
    return [
        Warn(
            f"Feed {name!r}: the nodes restart at their last checkpoint. The model loses the "
            f"{rows} rows in {len(calls)} micro-batches of a stream since then, because Spark does "
            "not send them again. Make checkpoints more often to lose fewer"
        )
    ]
