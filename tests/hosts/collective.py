"""A driver program without Spark: its nodes, on hosts of the bed, take their steps together.

Runs in: the driver, on the network of a host of the bed, and children

    python -m tests.hosts.collective WAY HOSTS [--fed] [--options JSON]

HOSTS is a JSON list: for each node, what to put before a command so that it runs on the node's
host. Each line that the driver prints is a JSON object with an `event`, and `at_s` of the clock
that all hosts share.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import sparkdl
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import NodeFailedError
from sparkdl.driver.executors import local
from sparkdl.node.context import NodeContext
from sparkdl.node.spec import AgentSpec, start_agent
from tests.doubles.ledger import table
from tests.doubles.nodes import has_checkpoint
from tests.hosts.train import has_begun_again, has_stopped, options_of, tell

STEPS = 240
ROWS = 3200
_BATCH = 8
_EVERY = 10
_PAUSE_S = 0.05
_WAIT_S = 200.0

Sum = Callable[[float], float]
"""Adds up a number over all nodes."""


# in the children


def plain(ctx: NodeContext) -> Sum:
    """Return the sum by way of the driver."""
    return lambda value: float(sum(ctx.all_gather(value)))


def ddp(ctx: NodeContext) -> Sum:
    """Return the sum by the gradients of PyTorch's DistributedDataParallel."""
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    distributed.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))

    def add(value: float) -> float:
        model.zero_grad()
        model(torch.full((1, 1), value)).sum().backward()
        return float(model.module.weight.grad) * ctx.num_workers

    return add


def horovod(ctx: NodeContext) -> Sum:
    """Return the sum by Horovod's API."""
    import torch

    import sparkdl.horovod.torch as hvd

    hvd.init()
    return lambda value: float(hvd.allreduce(torch.tensor(value), op=hvd.Sum))


def strategy(ctx: NodeContext) -> Sum:
    """Return the sum by TensorFlow's MultiWorkerMirroredStrategy."""
    import tensorflow as tf

    mirrored = tf.distribute.MultiWorkerMirroredStrategy()

    def reduce(value: Any) -> Any:
        values = mirrored.run(lambda: value)
        return mirrored.reduce(tf.distribute.ReduceOp.SUM, values, axis=None)

    compiled = tf.function(reduce)
    return lambda value: float(compiled(tf.constant(value)))


def psum(ctx: NodeContext) -> Sum:
    """Return the sum by JAX, over the mesh of all nodes."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    sharded = NamedSharding(ctx.mesh(nodes=-1), PartitionSpec("nodes"))
    reduce = jax.jit(lambda values: values.sum())
    mine = len(jax.local_devices())

    def add(value: float) -> float:
        part = np.full(mine, value / mine, np.float32)
        return float(reduce(jax.make_array_from_process_local_data(sharded, part)))

    return add


WAYS = {
    "plain": ("plain", plain),
    "ddp": ("torch", ddp),
    "horovod": ("torch", horovod),
    "strategy": ("tensorflow", strategy),
    "jax": ("jax", psum),
}


@dataclass(frozen=True)
class Plan:
    """How to train.

    Attributes:
        is_fed: one step for each batch, and the total is of rows; else of steps.
        pause_s: of each step.
    """

    way: str
    is_fed: bool
    pause_s: float


def train(plan: Plan, ctx: NodeContext) -> float:
    """Take steps with a sum over all nodes in each; return the total: `STEPS` or `ROWS`."""
    add = WAYS[plan.way][1](ctx)
    step, total, last = 0, 0.0, ctx.last_checkpoint
    if last is not None:
        step, total = last.step, float(np.load(last.folder / "total.npy"))
    never = threading.Event()
    for used, value in enumerate(_values(plan, ctx, step), 1):
        step += 1
        total += add(value)
        ctx.report(step=step)
        never.wait(plan.pause_s)
        if ctx.checkpoint_dir is not None and step % _EVERY == 0:
            with ctx.checkpoint(step, batches=used if plan.is_fed else None) as folder:
                if ctx.rank == 0:
                    np.save(folder / "total.npy", np.array(total))
    return total


def _values(plan: Plan, ctx: NodeContext, steps_before: int) -> Iterator[float]:
    if not plan.is_fed:
        yield from [1.0 / ctx.num_workers] * (STEPS - steps_before)
        return
    batches = ctx.batches(_BATCH, even=True, tail="pad")
    while batches.reader.peek_batch() is not None:
        for batch in batches:
            yield float((batch["sample_weight"] > 0).sum())


# in the driver


def start_nodes_on(hosts: list[list[str]]) -> None:
    """Have the agents of a local cluster be started on other hosts."""

    def start(
        agent_spec: AgentSpec, payload: bytes, python_path: list[str], stderr: int
    ) -> subprocess.Popen[bytes]:
        there, sys.executable = sys.executable, str(starters[agent_spec.node_id])
        try:
            return start_agent(agent_spec, payload, python_path, stderr)
        finally:
            sys.executable = there

    setattr(local, "start_agent", start)  # noqa: B010 (it is imported there)
    starters = []
    for number, entering in enumerate(hosts):
        starter = Path(os.environ["STARTERS"]) / f"python-{number}"
        starter.write_text(f'#!/bin/sh\nexec {" ".join(entering)} {sys.executable} "$@"\n')
        starter.chmod(0o755)
        starters.append(starter)


def watch(cluster: sparkdl.Cluster, has_restarts: bool) -> None:
    """Tell of the first checkpoint, of the loss of a node, and of what follows."""
    controller = cluster._controller
    if not controller.wait_for(has_checkpoint, Deadline.after(_WAIT_S)):
        raise SystemExit(f"no checkpoint: {controller.look(lambda view: view.state)}")
    tell("checkpoint", hosts=[member.host for member in cluster.world.members])
    controller.wait_for(has_stopped, Deadline.after(_WAIT_S))
    tell("noticed", status=cluster.status())
    if has_restarts and controller.wait_for(has_begun_again, Deadline.after(_WAIT_S)):
        tell("again", hosts=[member.host for member in cluster.world.members])


def main() -> None:
    """Train on the hosts, and tell what becomes of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("hosts", type=json.loads)
    parser.add_argument("--address", required=True, help="of the driver's host")
    parser.add_argument("--fed", action="store_true")
    parser.add_argument("--pause", type=float, default=_PAUSE_S, help="seconds of each step")
    parser.add_argument("--options", type=options_of, default={}, help="of launch, as JSON")
    args = parser.parse_args()
    start_nodes_on(args.hosts)
    local.LocalExecutor.driver_host = lambda self: args.address  # type: ignore[method-assign]
    plan, fed = Plan(args.way, args.fed, args.pause), sparkdl.Feeding(fed=args.fed)
    where: Any = {"framework": WAYS[args.way][0], "executor": "local", "feeding": fed}
    cluster = sparkdl.launch(None, train, plan, len(args.hosts), **where, **args.options)
    tell("launched", hosts=[member.host for member in cluster.world.members])
    try:
        feeding = cluster.feed_async(table(ROWS, parts=8)) if args.fed else None
        if "checkpoint_dir" in args.options:
            watch(cluster, has_restarts="max_restarts" in args.options)
        if feeding is not None:
            feeding.result(_WAIT_S)
        tell("trained", total=cluster.results(_WAIT_S)[0])
    except NodeFailedError as error:
        cause = error.root_cause
        failures = [failure.headline() for failure in error.failures]
        about = {"type": type(error).__name__, "kind": cause.kind, "host": cause.host}
        tell("failed", message=str(error), failures=failures, **about)
    finally:
        with suppress(NodeFailedError):  # which it raises once more
            cluster.shutdown()
        tell("shut down")


if __name__ == "__main__":
    main()
