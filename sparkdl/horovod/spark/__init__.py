"""`import sparkdl.horovod.spark`: Horovod's `run` and `run_elastic` over `sparkdl.launch`.

Runs in: driver

https://horovod.readthedocs.io/en/v0.28.1/spark_include.html
"""

from __future__ import annotations

from sparkdl.horovod.spark.runner import run, run_elastic

__all__ = ["run", "run_elastic"]
