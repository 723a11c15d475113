"""Horovod's elastic training: a process is killed, and the training goes on at its last commit.

    python examples/horovod/elastic_digits.py --die-at 30

Runs on this machine, without Spark: with a SparkSession, and `executor` left out, `run_elastic`
runs it on a cluster. The sampler shares out what is left of an epoch among those that are there.

Data: the 1,797 images of scikit-learn's `load_digits`. Prints `goes on at step …` after the kill,
and `elastic: training accuracy`. Takes about 15 seconds on two cores.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

from sparkdl.horovod.spark.runner import run_elastic

EPOCHS, BATCH, COMMIT_EVERY = 4, 32, 10


def train(args: argparse.Namespace) -> float:
    """Train, and return the accuracy. Runs in every process, and again after a failure."""
    import torch
    from sklearn.datasets import load_digits
    from torch.utils.data import DataLoader, TensorDataset

    import sparkdl.horovod.torch as hvd
    from sparkdl.node.context import current

    hvd.init()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    x = x.float() / 16
    data = TensorDataset(x, y)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=3e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(data)
    begun_again = bool(current() and current().restarts)  # type: ignore[union-attr]

    @hvd.elastic.run
    def fit(state: Any) -> None:
        if hvd.rank() == 0:
            print(f"{'goes on' if begun_again else 'begins'} at step {state.step}", flush=True)
        for state.epoch in range(state.epoch, EPOCHS):  # noqa: B020 (as in Horovod's documentation)
            for images, labels in DataLoader(data, BATCH, sampler=sampler):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
                state.step += 1
                sampler.record_batch(state.step, len(labels))
                if state.step == args.die_at and hvd.rank() == 1 and not begun_again:
                    os.kill(os.getpid(), signal.SIGKILL)
                if state.step % COMMIT_EVERY == 0:
                    state.commit()
            sampler.set_epoch(state.epoch + 1)

    def on_reset() -> None:
        print(f"{hvd.size()} processes after a failure", flush=True)

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0)
    state.register_reset_callbacks([on_reset])
    fit(state)
    return float((model(x).argmax(1) == y).float().mean())


def main() -> None:
    """Train in processes of this machine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-proc", type=int, default=2)
    parser.add_argument("--die-at", type=int, default=0, help="step; 0 for never")
    parser.add_argument("--checkpoints", help="folder or URL; by default a temporary one")
    args = parser.parse_args()

    accuracies = run_elastic(
        train,
        args=(args,),
        num_proc=args.num_proc,
        reset_limit=3,
        checkpoint_dir=args.checkpoints,
        executor="local",
        framework="torch",
    )
    print(f"elastic: training accuracy {accuracies[0]:.3f}")


if __name__ == "__main__":
    main()
