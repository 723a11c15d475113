"""`TFModel` and `TFEstimator` are saved and loaded whole."""

from __future__ import annotations

import io
import shutil
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from pyspark.ml import PipelineModel
from pyspark.sql import SparkSession

from sparkdl.core.errors import ConfigError
from sparkdl.ml import persistence
from sparkdl.ml.estimators.estimator import TFEstimator
from sparkdl.ml.model_file import ModelFile
from sparkdl.ml.persistence import copy_path
from sparkdl.ml.scoring.model import TFModel
from sparkdl.ml.summary import TrainingSummary
from tests.ml.conftest import Saved
from tests.ml.models import linear

pytestmark = pytest.mark.tensorflow


def test_loaded_model_needs_neither_code_nor_the_folder_it_came_from(
    spark_ml: SparkSession, saved: Saved, tmp_path: Path
) -> None:
    original = tmp_path / "exported"
    shutil.copytree(saved.exported, original)
    model: Any = TFModel({"export_dir": str(original), "unsaved": object(), "batch_size": 3})
    model.setInputMapping({"x": "x"}).setKeep(False)
    model._summary = TrainingSummary({"loss": [1.0, 0.5]})
    PipelineModel([model]).save(str(tmp_path / "pipeline"))
    (stage,) = tmp_path.glob("pipeline/stages/0_*")
    shutil.rmtree(original)
    loaded: Any = PipelineModel.load(str(tmp_path / "pipeline")).stages[0]
    assert isinstance(loaded, TFModel)
    assert loaded.uid == model.uid
    assert loaded.history == {"loss": [1.0, 0.5]}
    assert (loaded.getBatchSize(), loaded.getKeep()) == (3, False)
    frame = spark_ml.createDataFrame([([1.0, 2.0, 3.0],)], ["x"])
    (row,) = loaded.transform(frame).collect()
    assert np.allclose(row[0], linear([[1, 2, 3]])[0])
    with pytest.raises(ConfigError, match=r"holds a sparkdl\.TFModel, not a TFEstimator"):
        TFEstimator.load(str(stage))
    file = TFModel({"export_dir": saved.keras})
    for each in (loaded, file):
        each.write().overwrite().save(str(tmp_path / "again"))
        again: Any = TFModel.load(str(tmp_path / "again"))
        known = each._file.path if each._file else Path(saved.keras)
        assert again._file.path.read_bytes() == known.read_bytes()


def test_content_of_any_size_comes_back_and_a_part_that_lacks_is_an_error(
    spark_ml: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persistence, "_WRITE_NBYTES", 10)
    estimator: Any = TFEstimator(print)
    contents = {"large": bytes(range(25)), "empty": b"", "small": b"1234"}
    large = ModelFile.of(contents["large"], "keras")
    monkeypatch.setattr(estimator, "_contents", lambda spark: {**contents, "large": large})
    found: list[Any] = []

    def restored(contents: Any, _metadata: Any) -> Any:
        found.append({name: path.read_bytes() for name, path in contents.items()})
        return estimator

    monkeypatch.setattr(TFEstimator, "_restored", restored)
    for _ in range(2):
        estimator.write().overwrite().save(str(tmp_path))
        TFEstimator.load(str(tmp_path))
    assert found == [contents] * 2
    with pytest.raises(Exception, match="already exists"):
        estimator.save(str(tmp_path))
    max(tmp_path.glob("data/*.parquet"), key=lambda file: file.stat().st_size).unlink()
    with pytest.raises(ConfigError, match=r"lacks parts of .*: the stage was not saved whole"):
        TFEstimator.load(str(tmp_path))


def test_folder_is_one_content_also_where_tasks_alone_can_read_it(
    spark_ml: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model" / "deep").mkdir(parents=True)
    (tmp_path / "model" / "deep" / "inner").write_bytes(b"in")
    (tmp_path / "model" / "file").write_bytes(b"")

    def read(path: str) -> bytes:
        copy_path(spark_ml, path, tmp_path / "copy")
        return (tmp_path / "copy").read_bytes()

    def files() -> dict[str, bytes]:
        archive = zipfile.ZipFile(io.BytesIO(read(str(tmp_path / "model"))))
        return {name: archive.read(name) for name in archive.namelist()}

    assert files() == {"deep/inner": b"in", "file": b""}
    assert read(f"file://{tmp_path}/model/deep/inner") == b"in"
    with pytest.raises(FileNotFoundError):
        read(str(tmp_path / "gone"))
    monkeypatch.setattr(persistence, "context_of", lambda spark: None)
    real, tried = persistence._copy, iter([OSError("no such file on the client")])

    def fail_once(path: str, out: IO[bytes]) -> None:
        for error in tried:
            out.write(b"a part")
            raise error
        real(path, out)

    monkeypatch.setattr(persistence, "_copy", fail_once)
    assert files() == {"deep/inner": b"in", "file": b""}


def test_estimator_keeps_function_arguments_params(spark_ml: SparkSession, tmp_path: Path) -> None:
    factor = 3

    def train_fn(args: Any, ctx: Any) -> int:
        return int(args.mine) * factor

    estimator: Any = TFEstimator(train_fn, {"mine": 7}).setInputMapping({"a": "b"}).setEpochs(2)
    estimator.save(str(tmp_path / "estimator"))
    loaded: Any = TFEstimator.load(str(tmp_path / "estimator"))
    assert loaded.train_fn(loaded.args, None) == 21
    found = (loaded.uid, loaded.getEpochs(), loaded.getInputMapping())
    assert found == (estimator.uid, 2, {"a": "b"})
    assert not loaded.isSet("batch_size")


def test_what_cannot_be_saved_says_so(spark_ml: SparkSession, tmp_path: Path) -> None:
    import threading

    lock = threading.Lock()
    with pytest.raises(ConfigError, match="cannot be pickled"):
        TFEstimator(lambda args, ctx: lock, {}).save(str(tmp_path / "estimator"))
    with pytest.raises(ConfigError, match="does not know its model"):
        TFModel({}).save(str(tmp_path / "model"))
