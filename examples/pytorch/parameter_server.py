"""PyTorch: a parameter server by RPC. One process holds the model, others train; digits.

    python examples/pytorch/parameter_server.py

A program for torchrun, which starts itself in several processes by `TorchDistributor`: on this
machine, or on Spark's executors with `local_mode=False`. Workers do not wait for one another: each
gets the newest parameters, computes gradients on its own rows and sends them back.
https://docs.pytorch.org/docs/stable/rpc.html

Data: the 1,797 images of scikit-learn's `load_digits`. Prints `parameter server: accuracy`, above
0.9. Takes about 20 seconds on two cores.
"""

from __future__ import annotations

import argparse
import os
import threading
from typing import Any

import sparkdl

STEPS, BATCH = 300, 32


def build() -> Any:
    """Return the model, the same in all processes."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


class Server:
    """The model and its optimizer, in the first process."""

    def __init__(self) -> None:
        import torch

        self.net, self.lock = build(), threading.Lock()
        self.optimizer = torch.optim.Adam(self.net.parameters(), 3e-3)

    def step(self, gradients: list[Any] | None) -> list[Any]:
        """Take a step along `gradients`, if any; return the newest parameters."""
        with self.lock:
            if gradients:
                for parameter, gradient in zip(self.net.parameters(), gradients, strict=True):
                    parameter.grad = gradient
                self.optimizer.step()
            return [p.detach().clone() for p in self.net.parameters()]


servers: list[Server] = []


def step(gradients: list[Any] | None = None) -> list[Any]:
    """Take a step on the server; the workers call it."""
    return servers[0].step(gradients)


def work() -> None:
    """Run one of the processes: rank 0 serves."""
    import torch
    from sklearn.datasets import load_digits
    from torch.distributed import rpc

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        servers.append(Server())
    rpc.init_rpc(f"process{rank}", rank=rank, world_size=size)  # at MASTER_ADDR, MASTER_PORT
    if rank > 0:
        images, labels = load_digits(return_X_y=True)
        shard = slice(rank - 1, None, size - 1)
        x, y = torch.tensor(images[shard] / 16).float(), torch.tensor(labels[shard])
        net, newest = build(), rpc.rpc_sync("process0", step)
        for _ in range(STEPS):
            for own, parameter in zip(net.parameters(), newest, strict=True):
                own.data.copy_(parameter)
            rows = torch.randint(len(x), (BATCH,))
            net.zero_grad()
            torch.nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            newest = rpc.rpc_sync("process0", step, ([p.grad for p in net.parameters()],))
        accuracy = float((net(x).argmax(1) == y).float().mean())
        print(f"worker {rank}: parameter server: accuracy {accuracy:.2f}")
    rpc.shutdown()  # waits for all


def main() -> None:
    """Start the processes, or be one of them."""
    if "RANK" in os.environ:
        work()
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    sparkdl.TorchDistributor(1 + args.workers, local_mode=True, use_gpu=False).run(__file__)


if __name__ == "__main__":
    main()
