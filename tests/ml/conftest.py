"""What tests of Spark ML share: saved models, made once, and a DataFrame."""

from __future__ import annotations

import gc
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from sparkdl.core import files
from sparkdl.ml import model_file
from tests.ml import models

ROWS = 50
"""Of `frame`."""


@dataclass(frozen=True)
class Saved:
    """Paths of saved models.

    Attributes:
        exported: SavedModel of `models.dense`.
        keras: the same as a `.keras` file.
        two: `models.two_in_two_out` as a `.keras` file.
        functions: SavedModel of several signatures.
    """

    exported: str
    keras: str
    two: str
    functions: str


@pytest.fixture
def lone_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Give this process the environment of PyTorch's only node."""
    monkeypatch.setattr(files, "_place", tmp_path)
    for name, value in (("TORCHELASTIC_RUN_ID", "1"), ("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)


@pytest.fixture
def as_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have models sent as files of Spark; what stays of them in a program's lifetime is deleted."""
    for name, value in (("_PLAN_NBYTES", 0), ("_served", []), ("_released", [])):
        monkeypatch.setattr(model_file, name, value)
    yield
    model_file._served.clear()
    gc.collect()
    for name in model_file._released:
        Path(tempfile.gettempdir(), name).unlink()


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    folder: Path = tmp_path_factory.mktemp("models")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras' about numpy
        return _save(folder)


def _save(folder: Path) -> Saved:
    dense = models.dense()
    exported, keras, two = (str(folder / n) for n in ("exported", "dense.keras", "two.keras"))
    found = Saved(exported, keras, two, models.save_functions(folder / "functions"))
    dense.export(found.exported, verbose=False)
    dense.save(found.keras)
    models.two_in_two_out().save(found.two)
    return found


@pytest.fixture
def frame(spark_ml: SparkSession) -> DataFrame:
    """Columns `id`, `a.b` (text), `x` (array of 3 doubles), in one partition, for one worker."""
    return spark_ml.range(ROWS, numPartitions=1).selectExpr(
        "id",
        "cast(id as string) as `a.b`",
        "array(cast(id as double), 1d, cast(id * 2 as double)) as x",
    )
