"""TensorFlow nodes from the launch to the result, on Spark."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.doubles.programs import output_of

pytestmark = pytest.mark.tensorflow

ROOT = Path(__file__).parents[3]


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
