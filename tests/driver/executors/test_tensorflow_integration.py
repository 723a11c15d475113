"""TensorFlow nodes from the launch to the result, on local processes and on Spark."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sparkdl import demo
from tests.doubles.programs import output_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.tensorflow

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.deep)])
def test_demo_reaches_its_accuracy_and_saves_a_model(
    spark_local: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str], nodes: int
) -> None:
    model = tmp_path / "digits.keras"
    args = argparse.Namespace(nodes=nodes, epochs=6, batch_size=32, model=str(model))
    assert demo.run(spark_local, args) >= 0.9
    assert model.exists()
    out = capsys.readouterr().out
    assert "epoch  6 of 6: loss" in out
    assert "demo: test accuracy 0.9" in out.splitlines()[-1]


@pytest.mark.deep
@pytest.mark.spark
def test_example_runs_under_spark_submit_with_one_slot_per_executor(tmp_path: Path) -> None:
    conf = ("--conf", "spark.ui.enabled=false", "--conf", "spark.log.level=ERROR")
    said = output_of(
        *(Path(sys.executable).with_name("spark-submit"), "--master", "local-cluster[2,1,1024]"),
        *(*conf, ROOT / "examples/digits/train.py", "--epochs", "12"),
        *("--model", tmp_path / "digits.keras"),
        env={"PYSPARK_PYTHON": sys.executable},
        cwd=tmp_path,
        timeout_s=280,
    )
    last = said.strip().splitlines()[-1]
    assert last.startswith("demo: test accuracy ")
    assert float(last.split()[3].rstrip(",")) >= 0.95
