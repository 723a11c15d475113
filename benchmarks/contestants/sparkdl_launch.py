"""sparkdl: `sparkdl.launch` with a function that imports the framework, then shutdown."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from harness import NODES, compete, mark, options

if TYPE_CHECKING:
    from harness import Launch
    from pyspark.sql import SparkSession


def train(args: argparse.Namespace, ctx: Any) -> None:
    """Be the user's function on a node."""
    importlib.import_module(args.framework)
    mark(args.folder)


@contextmanager
def launch(spark: SparkSession, folder: str, framework: str, is_fed: bool) -> Iterator[None]:
    """Start the cluster, and shut it down."""
    import sparkdl

    args = argparse.Namespace(folder=folder, framework=framework)
    with sparkdl.launch(
        spark,
        train,
        args,
        nodes=NODES,
        framework=framework,
        feeding=sparkdl.Feeding(fed=is_fed),
    ) as cluster:
        yield
        cluster.results()


def prepare(framework: str, is_fed: bool) -> Launch:
    """Import what `sparkdl.launch` needs on the driver."""
    import sparkdl

    getattr(sparkdl, "launch")  # noqa: B009  public names are imported when they are first used
    return partial(launch, framework=framework, is_fed=is_fed)


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--framework", choices=["tensorflow", "torch"], required=True)
    parser.add_argument("--fed", dest="is_fed", action="store_true")
    parsed = parser.parse_args()
    prepared = partial(prepare, parsed.framework, parsed.is_fed)
    compete(parsed, parsed.framework, prepared)
