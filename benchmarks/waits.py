"""What does the thread cost that looks at what a node waits for? Steps with it, and without.

One process trains with PyTorch in small steps, as a child does. `README.md` says how to read it.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from statistics import median

import torch

from sparkdl.node.waits import WaitWatch


def train(seconds: float, is_watched: bool) -> tuple[float, float]:
    """Return how many steps a second a training takes, and milliseconds of CPU of a step."""
    model = torch.nn.Sequential(
        torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.rand(256, 784), torch.randint(0, 10, (256,))
    with WaitWatch(lambda waited: None, True) if is_watched else nullcontext():
        steps, since_s, cpu_s = 0, time.perf_counter(), time.process_time()
        while (took_s := time.perf_counter() - since_s) < seconds:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            steps += 1
        return steps / took_s, (time.process_time() - cpu_s) / steps * 1e3


def main() -> None:
    """Measure in turn, and print medians with the smallest and largest value."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
    train(given.seconds, False)  # what the first steps take does not count
    for _ in range(given.rounds):
        for name, each in found.items():
            each.append(train(given.seconds, name == "with"))
    for name, each in found.items():
        rates, cpu = zip(*each, strict=True)
        print(
            f"{name:<8}{median(rates):>8.1f} steps/s ({min(rates):.1f}-{max(rates):.1f}), "
            f"{median(cpu):.3f} ms of CPU a step ({min(cpu):.3f}-{max(cpu):.3f})"
        )


if __name__ == "__main__":
    main()
