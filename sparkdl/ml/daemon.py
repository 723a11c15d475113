"""Spark's daemon of Python workers, with a framework imported before it forks the first.

Runs in: feeder

Set `spark.python.daemon.module=sparkdl.ml.daemon`, and it is the parent of the workers: an executor
imports TensorFlow, pandas and the scoring once, ahead of the first task, and its workers share the
pages. Otherwise each worker imports them, most of the time of a scoring's first partition. Nothing
of TensorFlow but the import happens here: its threads and devices begin in the worker.

The executors' environment variable `SPARKDL_PRELOAD` names other modules, separated by commas.
"""

from __future__ import annotations

import gc
import logging
import os
from importlib import import_module

from sparkdl.core.imports import quick_imports

_log = logging.getLogger(__name__)


def main() -> None:
    """Import what workers will want, then do what `pyspark.daemon` does."""
    from pyspark.daemon import manager

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    names = os.environ.get("SPARKDL_PRELOAD", "tensorflow").split(",")
    # TensorFlow last: its symbols crash a later import of Triton, which PyTorch for GPUs brings
    # (https://github.com/tensorflow/tensorflow/issues/124205).
    asked = sorted(filter(None, map(str.strip, names)), key=lambda name: "tensorflow" in name)
    stdout = os.dup(1)
    os.dup2(2, 1)  # Spark reads a port from the standard output, which is no place for a log line
    try:
        with quick_imports():
            for name in (*asked, "pandas", "sparkdl.ml.scoring.task"):
                import_module(name)
    except ImportError as error:
        _log.warning(
            "A module of SPARKDL_PRELOAD cannot be imported before Python workers start: %s. "
            "Install it on the executors, or leave it out of SPARKDL_PRELOAD",
            error,
        )
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
    gc.collect()
    gc.freeze()  # or a worker's collector would copy the pages by looking at them
    manager()


if __name__ == "__main__":
    main()
