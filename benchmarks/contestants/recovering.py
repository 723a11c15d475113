"""The contestants of `recovery.py`: a training on two nodes, one process of which is killed.

Times are in seconds since the kill. Files in a folder record the events inside the nodes: `mark` of
`harness.py`, and the process ids of the user's functions.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import (
    NODES,
    arguments,
    claim_stdout,
    mark,
    marks,
    session,
    tf_cluster,
    wait_for_marks,
    write,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STEP_S = 0.02
BATCH = 32
DEADLINE_S = 120.0
"""Until all nodes are back."""


def arrive(folder: str, generation: int) -> Path:
    """On a node: record the entry into the user's function, and the process id."""
    here = Path(folder, str(generation))
    for name in ("entered", "stepped", "pids"):
        (here / name).mkdir(parents=True, exist_ok=True)
    (here / "pids" / str(os.getpid())).touch()
    mark(str(here / "entered"))
    return here


def step(here: Path, number: int) -> None:
    """On a node: take a step; record the first one."""
    time.sleep(STEP_S)
    if number == 0:
        mark(str(here / "stepped"))


def kill_one(args: argparse.Namespace, is_executor: bool = False) -> float:
    """Kill a process of a user's function, or its executor, `after_s` after all have stepped."""
    first = Path(args.folder, "0")
    wait_for_marks(first / "stepped", 120)
    time.sleep(args.after_s)
    pid = min(int(path.name) for path in (first / "pids").iterdir())
    return kill(executor_of(pid) if is_executor else pid)


def kill(pid: int) -> float:
    """Kill a process; return the time."""
    now = time.time()
    os.kill(pid, signal.SIGKILL)
    return now


def executor_of(pid: int) -> int:
    """Return the process id of the executor's JVM above a process."""
    import psutil

    return next(p.pid for p in psutil.Process(pid).parents() if p.name() == "java")


def return_s(folder: str, killed_s: float, deadline_s: float) -> dict[str, float | None]:
    """Return when all nodes were back in the user's function, and when all had taken a step."""
    found: dict[str, float | None] = {}
    for key, name in (("back_s", "entered"), ("step_s", "stepped")):
        try:
            found[key] = wait_for_marks(Path(folder, "1", name), deadline_s)[NODES - 1] - killed_s
        except TimeoutError:
            found[key] = None
    return found


class Said:
    """A call of the driver in a thread, with the time and the outcome of its end."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.at_s: float | None = None
        self.text = "nothing"
        self._call = call
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.text = outcome(self._call)
        self.at_s = time.time()


def outcome(call: Callable[[], Any]) -> str:
    """Run `call`; describe its outcome."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001 (the outcome is whatever a peer raises)
        first, *_ = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {first}"[:200]
    return "returned without an error"


def sparkdl_map_fun(args: argparse.Namespace, ctx: Any) -> None:
    here = arrive(args.folder, ctx.restarts)
    train = torch_training() if args.framework == "torch" else lambda: None
    for number, _batch in enumerate(ctx.batches(BATCH)):
        train()
        step(here, number)


def torch_training() -> Callable[[], None]:
    """Return an optimizer step of PyTorch, which imports more modules on its first call."""
    import torch

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters())

    def train() -> None:
        optimizer.zero_grad()
        model(torch.ones(BATCH, 1)).sum().backward()
        optimizer.step()

    return train


def by_sparkdl(spark: SparkSession, args: argparse.Namespace) -> dict[str, Any]:
    """A fed training on two nodes; sparkdl restarts it."""
    import sparkdl
    from sparkdl.core.deadline import Deadline
    from sparkdl.driver.lifecycle.state import Running

    cluster = sparkdl.launch(
        *(spark, sparkdl_map_fun, args, NODES), framework=args.framework, max_restarts=1
    )
    try:
        feeding = cluster.feed_async(spark.range(1 << 20).coalesce(2))
        at_s = kill_one(args, args.victim == "executor")
        cluster._controller.wait_for(
            lambda view: not isinstance(view.state, Running), Deadline.after(DEADLINE_S)
        )
        known_s = cluster._controller.events.now_s() - at_s
        times = return_s(args.folder, at_s, DEADLINE_S)
        said = cluster.status()
    finally:
        cluster.abort()
    feeding.exception(DEADLINE_S)
    return {"known_s": known_s, "said": said, **times}


def tfos_map_fun(args: argparse.Namespace, ctx: Any) -> None:
    import tensorflow  # noqa: F401

    here = arrive(args.folder, 0)
    feed = ctx.get_data_feed()
    number = 0
    while not feed.should_stop():
        feed.next_batch(BATCH)
        step(here, number)
        number += 1


def by_tfos(spark: SparkSession, args: argparse.Namespace) -> dict[str, Any]:
    """A fed training on two nodes; the driver may report the failure."""
    cluster = tf_cluster(spark, tfos_map_fun, args)
    rows = spark.sparkContext.parallelize(range(1 << 16), 2)
    train = Said(lambda: cluster.train(rows, feed_timeout=60))  # 600 by default
    at_s = kill_one(args)
    train.thread.join(480)
    known_s = train.at_s - at_s if train.at_s else None
    shutdown = outcome(lambda: cluster.shutdown(timeout=60))  # in the main thread: SIGALRM
    said = f"train {train.text}; shutdown {shutdown}"
    return {"known_s": known_s, "said": said, **return_s(args.folder, at_s, 0)}


def torch_train(folder: str) -> None:
    """Count a later attempt of the stage as the next generation."""
    import torch  # noqa: F401

    here = arrive(folder, int(len(marks(Path(folder, "0", "stepped"))) >= NODES))
    for number in range(100_000):
        step(here, number)


def by_torch(spark: SparkSession, args: argparse.Namespace) -> dict[str, Any]:
    """pyspark's TorchDistributor, until the driver reports the failure or the nodes are back."""
    from pyspark.ml.torch.distributor import TorchDistributor

    distributor = TorchDistributor(num_processes=NODES, local_mode=False, use_gpu=False)
    run = Said(lambda: distributor.run(torch_train, args.folder))
    at_s = kill_one(args)
    give_up_s = time.time() + DEADLINE_S
    stepped = Path(args.folder, "1", "stepped")
    while run.at_s is None and time.time() < give_up_s and len(marks(stepped)) < NODES:
        time.sleep(0.01)
    times = return_s(args.folder, at_s, 0)
    said = {"known_s": run.at_s - at_s if run.at_s else None, "said": run.text}
    spark.sparkContext.cancelAllJobs()
    run.thread.join(DEADLINE_S)
    return {**said, **times}


def replacement(spark: SparkSession, args: argparse.Namespace) -> dict[str, Any]:
    """A floor: from the kill of an idle executor until Python has run on its replacement."""

    def where(_: object) -> list[int]:
        time.sleep(0.1)
        return [executor_of(os.getpid())]

    def executors() -> set[int]:
        tasks = spark.sparkContext.parallelize(range(2 * NODES), 2 * NODES)
        return set(tasks.mapPartitions(where).collect())

    before = executors()
    at_s = kill(min(before))
    while len(executors() - {min(before)}) < NODES:
        time.sleep(0.01)
    return {"back_s": time.time() - at_s}


def hold(args: argparse.Namespace, ctx: Any) -> list[float]:
    """On a node: save 1 GB, from the first node; return the seconds of the training's thread."""
    import torch

    state, seconds = torch.rand(250_000_000 * ctx.is_chief), []
    copy = state.clone()  # once: memory that is new takes longer than the copy
    for number in range(args.kills):
        start = time.perf_counter()
        with (ctx.checkpoint_async if args.beside else ctx.checkpoint)(number) as made:
            if args.beside:
                copy.copy_(state)
                made.until(lambda file=made.folder / f"{ctx.rank}": torch.save(copy, file))
            else:
                torch.save(state, made / f"{ctx.rank}")
        seconds.append(time.perf_counter() - start)
        ctx._checkpoints.await_in_flight()
    return seconds


def bare_import(framework: str) -> float:
    """A floor: the time in which both of two processes import the framework."""
    start = time.time()
    them = [subprocess.Popen([sys.executable, "-c", f"import {framework}"]) for _ in range(NODES)]
    for one in them:
        if one.wait():
            raise RuntimeError(f"import {framework} failed")
    return time.time() - start


WAYS = {"sparkdl": by_sparkdl, "tfos": by_tfos, "torch": by_torch, "executor": replacement}


def main() -> None:
    args = arguments(framework="tensorflow", victim="child")
    lines = claim_stdout()
    if args.way == "import":
        bare_import(args.framework)  # into the page cache
        for _ in range(args.kills):
            write(lines, "recovery", back_s=bare_import(args.framework))
        return
    if args.way == "hold":
        import sparkdl

        where = {"executor": "local", "checkpoint_dir": "saved"}
        with sparkdl.launch(None, hold, args, NODES, **where) as it:
            for seconds in it.results()[0][1:]:  # the first warms up
                write(lines, "hold", held_s=seconds)
        return
    slots = 1 if args.way == "tfos" else 2  # it supports no other
    retries = {"spark.deploy.maxExecutorRetries": "-1"}
    with session("bench-recovery", slots, retries) as spark:
        for _ in range(args.kills):
            with tempfile.TemporaryDirectory(prefix="bench-recovery-") as args.folder:
                for generation in ("0", "1"):
                    for name in ("entered", "stepped", "pids"):
                        Path(args.folder, generation, name).mkdir(parents=True)
                write(lines, "recovery", **WAYS[args.way](spark, args))


if __name__ == "__main__":
    main()
