"""Programs that were written for TensorFlowOnSpark run after one word of them was changed."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

pytestmark = pytest.mark.tensorflow

PROGRAMS = Path(__file__).parent / "programs"

RunProgram = Callable[..., None]


@pytest.fixture
def run_program(
    spark_cluster: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> RunProgram:
    """Change the word in a program's text, and run it as `python program arguments`."""

    def run(name: str, *arguments: str) -> None:
        text = (PROGRAMS / name).read_text()
        assert "tensorflowonspark" in text
        program = tmp_path / name
        program.write_text(text.replace("tensorflowonspark", "sparkdl.tfos"))
        monkeypatch.setattr(sys, "argv", [str(program), *arguments])
        runpy.run_path(str(program), run_name="__main__")

    return run


@pytest.mark.deep  # the demo learns them from Spark by default
def test_digits_are_learnt_from_spark_exported_and_told(
    run_program: RunProgram, tmp_path: Path
) -> None:
    run_program("mnist_spark.py", "--export_dir", str(tmp_path / "model"), "--epochs", "4")
    assert (tmp_path / "model" / "saved_model.pb").exists()
    run_program(
        "mnist_inference.py", "--export_dir", str(tmp_path / "model"),
        "--output", str(tmp_path / "told"), "--unknown", "1",
    )  # fmt: skip
    parts = sorted((tmp_path / "told").glob("part-*"))
    pairs = [line.split() for part in parts for line in part.read_text().splitlines()]
    assert len(pairs) == 597
    assert len(parts) == 3
    assert sum(label == told for label, told in pairs) / len(pairs) > 0.8
