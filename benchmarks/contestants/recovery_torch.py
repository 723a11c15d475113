"""pyspark's TorchDistributor: a training of two processes, of which one is killed."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import NODES, claim_stdout, session, write
from recovering import Said, arrive, kill, options_of_kills, prepare, return_s, step, victim

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def train(folder: str) -> None:
    """Be the user's function on a node; in a later attempt of the stage, be the next generation."""
    import torch  # noqa: F401

    has_begun = len(list(Path(folder, "0", "stepped").iterdir())) >= NODES
    here = arrive(folder, int(has_begun))
    for number in range(100_000):
        step(here, number)


def recover(spark: SparkSession, parsed: argparse.Namespace) -> dict[str, Any]:
    """Run, kill, and wait for what the driver says, or for the nodes to be back."""
    from pyspark.ml.torch.distributor import TorchDistributor

    with tempfile.TemporaryDirectory(prefix="bench-recovery-") as folder:
        prepare(folder)
        distributor = TorchDistributor(num_processes=NODES, local_mode=False, use_gpu=False)
        run = Said(lambda: distributor.run(train, folder))
        at_s = kill(victim(folder, parsed.after_s))
        give_up_s = time.time() + parsed.deadline_s
        stepped = Path(folder, "1", "stepped")
        while run.at_s is None and time.time() < give_up_s and len(_marks(stepped)) < NODES:
            time.sleep(0.01)
        times = return_s(folder, at_s, 0)
        known_s = run.at_s - at_s if run.at_s else None
        said = run.text
        spark.sparkContext.cancelAllJobs()
        run.wait(parsed.deadline_s)
    return {"known_s": known_s, "said": said, **times}


def _marks(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.suffix]


if __name__ == "__main__":
    parsed = options_of_kills(__doc__).parse_args()
    lines = claim_stdout()
    with session("bench-recovery", parsed.slots) as spark:
        for _ in range(parsed.kills):
            write(lines, {"event": "recovery", **recover(spark, parsed)})
