"""Spark finds a real GPU by a script: a node trains on it, and tasks that score share it."""

from __future__ import annotations

import os
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from pyspark.sql import functions as f

from sparkdl import TorchEstimator, TorchModel, predict
from tests.doubles.sessions import NO_WORKERS, SparkSessions
from tests.ml.torch_fits import adam, at_epochs, net

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.gpu, pytest.mark.spark, pytest.mark.torch, pytest.mark.timeout(400)]

ROWS, SLOTS = 400, 4
# As Spark's own getGpusResources.sh, which is not in pyspark's packages.
DISCOVERS = """\
#!/bin/sh
found=$(nvidia-smi --query-gpu=index --format=csv,noheader | sed 's/.*/"&"/' | paste -s -d , -)
echo "{\\"name\\": \\"gpu\\", \\"addresses\\": [$found]}"
"""


@pytest.fixture
def spark(
    spark_sessions: SparkSessions,
    spark_session_on: Any,  # which ends the session, and lets its processes live until then
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> SparkSession:
    """A session on a standalone cluster of one worker, which discovers its GPUs.

    Its parameter is how much of a GPU a task has; by default none, as docs/deployment.md advises.
    """
    if import_module("torch").version.cuda is None:
        pytest.skip("this PyTorch is built without CUDA")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    script = tmp_path / "getGpusResources.sh"
    script.write_text(DISCOVERS)
    script.chmod(0o700)
    extra = {"spark.executor.resource.gpu.amount": "1", "spark.executor.cores": str(SLOTS)}
    if amount := getattr(request, "param", ""):
        extra["spark.task.resource.gpu.amount"] = amount
    session = spark_sessions.get(NO_WORKERS, extra)
    gpu = "-Dspark.worker.resource.gpu"
    options = f"{gpu}.amount=1 {gpu}.discoveryScript={script}"
    url: Any = session.sparkContext.master
    spark_sessions.add_worker(url, 0, SLOTS, SPARK_WORKER_OPTS=options)
    return session


def points(spark: SparkSession) -> DataFrame:
    """Return rows of `x`, `y`, `id`, of which `y` is linear in `x`."""
    numbers = spark.range(ROWS, numPartitions=SLOTS)
    rows = numbers.selectExpr("id", "id % 7 / 7 as a", "id % 5 / 5 as b")
    x = "cast(array(a, b, a * b) as array<float>) as x"
    return rows.selectExpr("id", x, "float(a - 2 * b) as y")


def is_on_gpu(epoch: int, trainer: Any) -> None:
    """Fail the training unless its model is on a GPU."""
    assert all(parameter.is_cuda for parameter in trainer.lightning_module.parameters())


def test_estimator_fits_on_the_gpu_and_its_model_scores(spark: SparkSession) -> None:
    options: dict[str, Any] = {"features_col": "x", "label_col": "y", "batch_size": 16, "epochs": 8}
    options |= {"optimizer": adam, "seed": 1, "callbacks": partial(at_epochs, is_on_gpu)}
    estimator: Any = TorchEstimator(net, loss="MSELoss", **options)
    model = estimator.fit(points(spark))
    assert model.history["loss"][-1] < 0.5 * model.history["loss"][0]
    scored = model.transform(points(spark)).collect()
    assert np.mean([(row.prediction - row.y) ** 2 for row in scored]) < 0.1


@pytest.mark.parametrize("spark", ["", "0.25"], indirect=True)
def test_task_slots_share_one_model_on_the_gpu_and_score_as_a_cpu_does(spark: SparkSession) -> None:
    import torch

    torch.manual_seed(3)
    module = net().eval()
    rows = points(spark).withColumn("partition", f.spark_partition_id()).cache()
    stage: Any = TorchModel(module).setFeaturesCol("x").setBatchSize(32)
    scored = stage.setOutputTypes({"output": "array<float>"}).transform(rows)
    found = {row.id: row.output for row in scored.collect()}
    x = torch.tensor([row.x for row in sorted(rows.collect(), key=lambda row: row.id)])
    with torch.no_grad():
        np.testing.assert_allclose([found[i] for i in range(ROWS)], module(x), atol=1e-4)

    def make() -> Any:
        import torch

        on_gpu = module.to("cuda")

        def fn(columns: dict[str, Any]) -> dict[str, Any]:
            with torch.no_grad():
                y = on_gpu(torch.tensor(columns["x"], device="cuda"))[:, 0].cpu()
            return {"y": y.numpy(), "pid": [os.getpid()] * len(y)}

        return fn

    told = predict(rows, make, ["x"], "y float, pid long", batch_size=32, keep=["id"]).collect()
    assert len({row.pid for row in told}) == 1
    np.testing.assert_allclose(
        [row.y for row in sorted(told, key=lambda row: row.id)],
        [found[i][0] for i in range(ROWS)],
        atol=1e-4,
    )
    rows.unpersist()
