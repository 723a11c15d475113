"""What the nodes of the Spark tests run."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkdl import NodeContext


def count_rows(args: Any, ctx: NodeContext) -> dict[str, int]:
    """Read the feed to its end; return how many rows there were, and their sum."""
    feed = ctx.get_data_feed()
    rows = total = 0
    while not feed.should_stop():
        batch = feed.next_batch(100)
        rows += len(batch)
        total += sum(getattr(row, "id", row) for row in batch)
    return {"rank": ctx.rank, "rows": rows, "total": total}


def double(args: Any, ctx: NodeContext) -> None:
    """Answer inference: twice the row."""
    feed = ctx.get_data_feed(train_mode=False)
    while not feed.should_stop():
        feed.batch_results([2 * value for value in feed.next_batch(7)])


def fail_at_a_row(args: Any, ctx: NodeContext) -> None:
    """Take a row of inference and raise."""
    ctx.get_data_feed(train_mode=False).next_batch(1)
    raise ValueError("no such layer")


def steps_of_epochs(args: Any, ctx: NodeContext) -> list[list[int]]:
    """Return the rows of each batch, for each of `args` epochs."""
    batches = ctx.batches(args["batch_size"], even=True)
    return [[len(batch["id"]) for batch in batches] for _ in range(args["epochs"])]


def nothing(args: Any, ctx: NodeContext) -> None:
    """Return at once."""


def score(args: str, ctx: NodeContext) -> None:
    """Answer inference as the file `args` says by then: `kind`, `read` and `answer` at a time."""
    feed, how = ctx.get_data_feed(train_mode=False), {"read": 7}
    while not feed.should_stop():
        rows = feed.next_batch(how["read"])
        how = json.loads(Path(args).read_text())
        results = [RESULTS[how["kind"]](row) for row in rows]
        for start in range(0, len(results), how["answer"]):
            feed.batch_results(results[start : start + how["answer"]])


RESULTS: dict[str, Any] = {
    "scalar": lambda row: row.id / 2,
    "list": lambda row: [float(i) for i in range(row.id % 4)],
    "dict": lambda row: {"half": row.id / 2, "name": f"n{row.id}"},
    "misfit": lambda row: "text" if row.id >= 14 else 1.0,  # 7 are answered at a time
}


def use_rows(args: dict[str, Any], ctx: NodeContext) -> list[int]:
    """Use rows, save them after every third step; in the first world wait for an end by force."""
    print(
        f"world {ctx.generation} child {os.getpid()} agent {os.environ['SPARKDL_AGENT_PID']}",
        flush=True,
    )
    last = ctx.last_checkpoint
    rows = json.loads(Path(last, f"rows-{ctx.rank}").read_text()) if last else []
    step = last.step if last else 0
    batches = ctx.batches(8, ["id"], even=True, tail="pad")
    while batches.reader.peek_batch() is not None:
        for batch in batches:
            rows += batch["id"][batch["sample_weight"] > 0].tolist()
            step += 1
            if step % 3 == 0:
                with ctx.checkpoint(step) as folder:
                    (folder / f"rows-{ctx.rank}").write_text(json.dumps(rows))
            if ctx.restarts == 0 and step == args["stops_at"]:
                threading.Event().wait()
    return rows
