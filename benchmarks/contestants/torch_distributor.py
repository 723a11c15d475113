"""pyspark's TorchDistributor: `run` with a function that imports torch.

`run` blocks until the function has returned on every node, so leaving the manager has nothing
left to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from harness import NODES, compete, mark, options

if TYPE_CHECKING:
    from harness import Launch
    from pyspark.sql import SparkSession


def train(folder: str) -> None:
    """Be the user's function on a node."""
    import torch  # noqa: F401

    mark(folder)


@contextmanager
def launch(spark: SparkSession, folder: str) -> Iterator[None]:
    """Run the function on every node; everything is down when this returns."""
    from pyspark.ml.torch.distributor import TorchDistributor

    TorchDistributor(num_processes=NODES, local_mode=False, use_gpu=False).run(train, folder)
    yield


def prepare() -> Launch:
    """Import the distributor."""
    import pyspark.ml.torch.distributor  # noqa: F401

    return launch


if __name__ == "__main__":
    compete(options(__doc__).parse_args(), "torch", prepare)
