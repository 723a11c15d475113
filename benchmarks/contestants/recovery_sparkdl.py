"""sparkdl: a fed training of two nodes, of which a process is killed; it goes on by itself."""

from __future__ import annotations

import argparse
import tempfile
from typing import TYPE_CHECKING, Any

from harness import claim_stdout, session, write
from recovering import arrive, executor_of, kill, options_of_kills, prepare, return_s, step, victim

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

ROWS = 1 << 20
BATCH = 32


def map_fun(args: argparse.Namespace, ctx: Any) -> None:
    """Be the user's function on a node."""
    here = arrive(args.folder, ctx.restarts)
    train = torch_training() if args.framework == "torch" else lambda: None
    for number, _batch in enumerate(ctx.batches(BATCH)):
        train()
        step(here, number)


def torch_training() -> Callable[[], None]:
    """Return a step of an optimizer of PyTorch, which imports more at the first."""
    import torch

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters())

    def train() -> None:
        optimizer.zero_grad()
        model(torch.ones(BATCH, 1)).sum().backward()
        optimizer.step()

    return train


def recover(spark: SparkSession, parsed: argparse.Namespace) -> dict[str, Any]:
    """Launch, kill, and wait until all nodes train again."""
    import sparkdl
    from sparkdl.core.deadline import Deadline
    from sparkdl.driver.lifecycle.state import Running

    with tempfile.TemporaryDirectory(prefix="bench-recovery-") as folder:
        prepare(folder)
        cluster = sparkdl.launch(
            spark,
            map_fun,
            argparse.Namespace(folder=folder, framework=parsed.framework),
            2,
            framework=parsed.framework,
            max_restarts=1,
        )
        try:
            feeding = cluster.feed_async(spark.range(ROWS).coalesce(2))
            pid = victim(folder, parsed.after_s)
            killed = executor_of(pid) if parsed.victim == "executor" else pid
            at_s = kill(killed)
            cluster._controller.wait_for(
                lambda view: not isinstance(view.state, Running), Deadline.after(parsed.deadline_s)
            )
            known_s = cluster._controller.events.now_s() - at_s
            times = return_s(folder, at_s, parsed.deadline_s)
            said = cluster.status()
        finally:
            cluster.abort()
        feeding.exception(parsed.deadline_s)
    return {"known_s": known_s, "said": said, **times}


if __name__ == "__main__":
    parser = options_of_kills(__doc__)
    parser.add_argument("--framework", default="tensorflow")
    parser.add_argument("--victim", choices=["child", "executor"], default="child")
    parsed = parser.parse_args()
    lines = claim_stdout()
    settings = {"spark.deploy.maxExecutorRetries": "-1"}
    with session("bench-recovery", parsed.slots, settings) as spark:
        for _ in range(parsed.kills):
            write(lines, {"event": "recovery", **recover(spark, parsed)})
