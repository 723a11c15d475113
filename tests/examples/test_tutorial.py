"""The tutorial's program runs as the page says, on a standalone cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "tutorial.md"


@pytest.mark.deep
@pytest.mark.tensorflow
@pytest.mark.timeout(240)
def test_program_trains_and_scores_on_a_standalone_cluster_and_its_user_sees_it(
    spark_standalone: SparkSession, tmp_path: Path
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    (program,) = [p for p in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "def main" in p]
    path = tmp_path / "train.py"
    path.write_text(program.replace("/tmp/", f"{tmp_path}/"), encoding="utf-8")
    master = str(spark_standalone.sparkContext.master)
    spark_standalone.stop()  # its executors hold the slots
    submit = str(Path(sys.executable).with_name("spark-submit"))
    command = [submit, "--master", master, "--conf", "spark.log.level=WARN", str(path)]
    env = {**os.environ, "SPARKDL_DASHBOARD": "1"}  # as for a user, not as for a test
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=200)
    found = re.search(r"accuracy on test rows: (0\.\d+)", run.stdout)
    assert found, run.stdout + run.stderr
    assert float(found[1]) > 0.9
    assert re.search(r"^Dashboard: http\S+$", run.stdout, re.MULTILINE), run.stdout
    assert "[worker:0] Epoch 8/8" in run.stdout
    assert "[worker:1]" not in run.stdout
    assert len(re.findall(r" INFO ", run.stderr)) < 20, run.stderr
