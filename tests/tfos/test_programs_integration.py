"""Programs that were written for TensorFlowOnSpark run after one word of them was changed."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pyspark.sql import SparkSession

from sparkdl.ml.estimators.source import source_of
from sparkdl.ml.scoring.held import load

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
def test_digits_are_learnt_from_spark_and_exported(run_program: RunProgram, tmp_path: Path) -> None:
    run_program("mnist_spark.py", "--export_dir", str(tmp_path / "model"), "--epochs", "4")
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    predictor = load(source_of(str(tmp_path / "model")))
    (name,) = (tensor.name for tensor in predictor.signature.inputs)
    (scores,) = predictor({name: images[1200:].astype("float32") / 16}).values()
    assert np.mean(scores.argmax(1) == labels[1200:]) > 0.8
