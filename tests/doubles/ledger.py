"""A training whose model is the multiset of the rows that it has seen: it shows what was lost.

Runs in: children, and the process of pytest
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.node.context import NodeContext
from tests.doubles.map_funs import die

BATCH = 8


@dataclass(frozen=True)
class Plan:
    """How to train, and what goes wrong.

    Attributes:
        every: steps between two checkpoints.
        faults: `(generation, rank, step, how)`, see `doubles.map_funs.die`.
        pause_s: of each step.
        is_slow_once: whether there is a pause in the first world alone.
        stuck_at: the step whose asynchronous checkpoint the first world never finishes.
    """

    every: int = 4
    faults: tuple[tuple[int, int, int, str], ...] = ()
    pause_s: float = 0.0
    is_slow_once: bool = False
    stuck_at: int | None = None


def train(plan: Plan, ctx: NodeContext) -> list[int]:
    """Train until the feed has ended; return the rows in this node's part of the model.

    All nodes take the same steps. The first node goes on with the parts of all.
    """
    seen: list[int] = []
    step, last = 0, ctx.last_checkpoint
    if last is not None:
        step = last.step
        if ctx.rank == 0:
            for part in sorted(last.folder.glob("part-*.npy")):
                seen += np.load(part).tolist()
    is_sliced = ctx._spec.settings.feeding.global_batch_size is not None
    batches = ctx.batches(None if is_sliced else BATCH, even=True, tail="pad")
    used, reader = 0, batches.reader
    never = threading.Event()
    while reader.peek_batch() is not None:
        for batch in batches:
            step, used = step + 1, used + 1
            for fault in plan.faults:
                if fault[:3] == (ctx.generation, ctx.rank, step):
                    die(fault[3])
            never.wait(0.0 if ctx.generation and plan.is_slow_once else plan.pause_s)
            seen += batch["row"][batch["sample_weight"] > 0].tolist()
            if step % plan.every == 0:
                save(ctx, step, used, seen, ctx.generation == 0 and step == plan.stuck_at)
    return seen


def save(ctx: NodeContext, step: int, used: int, seen: list[int], is_stuck: bool) -> None:
    if is_stuck:
        ctx.barrier()  # the first node has completed the checkpoint before
        with ctx.checkpoint_async(step, batches=used) as saving:
            saving.until(threading.Event().wait)
        return
    with ctx.checkpoint(step, batches=used) as folder:
        np.save(folder / f"part-{ctx.rank}.npy", np.array(seen, np.int64))


def table(rows: int, parts: int = 1) -> list[pa.Table]:
    """Return rows to feed: their numbers, in so many partitions."""
    numbers = np.array_split(np.arange(rows, dtype=np.int64), parts)
    return [pa.table({"row": part}) for part in numbers]


def lost_and_doubled(parts: Iterable[Sequence[Any]], rows: int, epochs: int = 1) -> tuple[int, int]:
    """Return how many rows the model of all nodes has too few and too many."""
    seen = Counter(int(row) for part in parts for row in part)
    wanted = Counter(dict.fromkeys(range(rows), epochs))
    return (wanted - seen).total(), (seen - wanted).total()
