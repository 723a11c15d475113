"""`horovod.spark.run` on Spark, and what there is without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sparkdl.core.errors import ConfigError
from sparkdl.horovod.spark import run, run_elastic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def total(base: int) -> tuple[int, float]:
    import torch

    import sparkdl.horovod.torch as hvd
    from sparkdl.horovod.spark.task import get_available_devices

    hvd.init()
    assert isinstance(get_available_devices(), list)
    layer = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0))
    layer(torch.ones(1, 1)).backward()
    optimizer.step()
    return hvd.rank(), float(hvd.allreduce(torch.tensor(float(base + hvd.rank())), op=hvd.Sum))


def place(base: int) -> tuple[int, int]:
    from sparkdl.node.context import current

    ctx = current()
    assert ctx is not None
    return ctx.rank, base + ctx.num_workers


def test_run_takes_the_active_session(spark_local: SparkSession) -> None:
    found = run(place, args=(5,), num_proc=2, verbose=0, framework="plain")
    assert found == [(0, 7), (1, 7)]


@pytest.mark.torch
@pytest.mark.deep  # test_torch_integration.py has the operations on local nodes
def test_optimizer_and_operations_work_on_spark(spark_local: SparkSession) -> None:
    assert run(total, args=(5,), num_proc=2, verbose=0) == [(0, 11.0), (1, 11.0)]


def test_run_without_a_session_says_so() -> None:
    from pyspark import SparkContext

    if SparkContext._active_spark_context is None:
        with pytest.raises(ConfigError, match="no active SparkContext"):
            run_elastic(total, num_proc=2)
