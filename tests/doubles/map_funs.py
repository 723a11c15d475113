"""What nodes run in tests. Here, for a child to import it without the test."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from sparkdl.node.context import NodeContext


def wait_for_end(args: Any, ctx: NodeContext) -> int:
    """Read the feed to its end; return the rank."""
    feed = ctx.get_data_feed()
    while not feed.should_stop():
        feed.next_batch(10)
    return ctx.rank


def hang(args: Any, ctx: NodeContext) -> None:
    signal.pause()


def die(how: str) -> None:
    """End this process in one of several ways."""
    if how == "os._exit":
        os._exit(3)  # noqa: TID251
    if how == "segfault":
        import ctypes

        ctypes.string_at(0)
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "agent":
        os.kill(int(os.environ["SPARKDL_AGENT_PID"]), signal.SIGKILL)
        signal.pause()


def hold_checkpoint(ctx: NodeContext, step: int) -> None:
    """Never finish this checkpoint in the first generation: a training that waits for it hangs."""
    if ctx.generation:
        return
    store: Any = ctx._checkpoints._store
    finish = store.finish

    def held(name: Any, *given: Any) -> None:
        if name.step == step:
            threading.Event().wait()
        finish(name, *given)

    store.finish = held


def count_rows(args: Any, ctx: NodeContext) -> list[int]:
    """Read the feed to its end; return how many rows there were, and their sum."""
    feed, rows, total = ctx.get_data_feed(), 0, 0
    while not feed.should_stop():
        batch = feed.next_batch(100)
        assert isinstance(batch, list)
        rows, total = rows + len(batch), total + sum(batch)
    return [rows, total]


def double(args: Any, ctx: NodeContext) -> None:
    """Answer each row of inference with twice its value."""
    feed = ctx.get_data_feed(train_mode=False)
    while not feed.should_stop():
        feed.batch_results([2 * row for row in feed.next_batch(100)])
