"""The examples: in this process, and with `--deep` as their first lines tell a user to run them.

In this process they take the shared Spark session, and start neither a JVM nor an interpreter.
Those marked deep show what the tests of their subject prove already.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

EXAMPLES = Path(__file__).parents[2] / "examples"
SUBMIT = Path(sys.executable).with_name("spark-submit")
DEADLINE_S = 240.0

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("run_name"),
    pytest.mark.filterwarnings("default"),  # as for a user
]

SPARK = pytest.mark.usefixtures("spark_local")
Said = Callable[..., float]


@pytest.fixture(params=["here", pytest.param("as a user", marks=pytest.mark.deep)])
def said(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Said:
    """A function that runs an example in `tmp_path` and returns the number behind `what`."""

    def here(script: str, *args: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [script, *args])
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # else PyTorch sets it
        monkeypatch.setattr(SparkSession, "stop", lambda self: None)  # it is that of all tests
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return capsys.readouterr().out

    def as_a_user(script: str, *args: str) -> str:
        done = subprocess.run(
            [*starter(script), str(EXAMPLES / script), *args],
            cwd=tmp_path,
            env=os.environ | {"PYSPARK_PYTHON": sys.executable},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout

    def said(script: str, *args: str, what: str) -> float:
        output = (here if request.param == "here" else as_a_user)(script, *args)
        found = re.search(rf"{what} ([\d.]+)$", output, re.MULTILINE)
        assert found, output[-4000:]
        return float(found[1])

    return said


def starter(script: str) -> list[str]:
    """Return the words before the program, by the line in it that starts it."""
    if starting_line(script)[1] == "python":
        return [sys.executable]
    settings = ("spark.ui.enabled=false", "spark.sql.shuffle.partitions=4")
    conf = [word for setting in settings for word in ("--conf", setting)]
    return [str(SUBMIT), "--master", "local[4]", *conf]


def starting_line(script: str) -> re.Match[str]:
    text = (EXAMPLES / script).read_text(encoding="utf-8")
    found = re.search(rf"^    (spark-submit|python) examples/{script}", text, re.MULTILINE)
    assert found, f"{script} does not begin with the line that starts it"
    return found


def test_every_example_is_in_the_index_and_begins_with_the_line_that_starts_it() -> None:
    index = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for path in sorted(EXAMPLES.rglob("*.py")):
        name = path.relative_to(EXAMPLES).as_posix()
        assert f"({name})" in index, f"{name} is not in examples/README.md"
        assert starting_line(name)


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    "step", [pytest.param("single.py", marks=pytest.mark.deep), "distributed.py"]
)
def test_segmentation_without_spark(said: Said, step: str) -> None:
    assert said(f"segmentation/{step}", "--images=1000", what="intersection over union") > 0.6


@SPARK
@pytest.mark.tensorflow
def test_segmentation_on_spark(said: Said) -> None:
    assert said("segmentation/spark.py", "--images=1000", what="intersection over union") > 0.6


@SPARK
@pytest.mark.tensorflow
def test_own_data(said: Said) -> None:
    assert said("own_data/train.py", what="test accuracy") > 0.8


@SPARK
@pytest.mark.tensorflow
def test_tfrecords_are_trained_from_and_scored_in_parallel(said: Said, tmp_path: Path) -> None:
    assert said("tfrecords/train.py", what="training accuracy") > 0.8
    assert said("tfrecords/inference.py", what="test accuracy") > 0.8
    assert len(list((tmp_path / "out" / "predictions").iterdir())) == 2


@SPARK
@pytest.mark.tensorflow
def test_pipeline(said: Said) -> None:
    assert said("pipeline.py", "--nodes=1", what="area under the curve") > 0.95


@SPARK
@pytest.mark.tensorflow
def test_hyperparameters(said: Said) -> None:
    options = ("--learning-rates", "1e-6", "0.01", "--units", "32")
    assert said("hyperparameters.py", *options, what="best accuracy") > 0.9


@SPARK
@pytest.mark.torch
def test_jobs(said: Said) -> None:
    assert said("jobs/digits.py", "--epochs=3", what="test accuracy") > 0.9


@SPARK
@pytest.mark.torch
def test_tuning(said: Said) -> None:
    assert said("tuning/optuna_digits.py", "--trials=3", what="best accuracy") > 0.7


@SPARK
@pytest.mark.torch
def test_pytorch(said: Said) -> None:
    assert said("pytorch/train.py", "--epochs=5", what="at last") < 1


@pytest.mark.spark
@pytest.mark.torch
@pytest.mark.parametrize("said", ["as a user"], indirect=True)
def test_an_example_runs_under_spark_submit(said: Said) -> None:
    """One of them without `--deep`: `__main__` and the session are other ones there."""
    assert said("pytorch/train.py", "--epochs=5", what="at last") < 1


@SPARK
@pytest.mark.torch
def test_torch_distributor(said: Said) -> None:
    assert said("pytorch/distributor.py", "--epochs=5", what="TorchDistributor: accuracy") > 0.9


@pytest.mark.deep
@pytest.mark.torch
def test_pytorch_in_shards_goes_on_after_a_failure(said: Said) -> None:
    assert said("pytorch/sharded.py", "--fail-at=50", what="FSDP2: accuracy") > 0.9


@pytest.mark.deep
@pytest.mark.torch
def test_parameter_server_by_rpc(said: Said) -> None:
    assert said("pytorch/parameter_server.py", what="parameter server: accuracy") > 0.9


@pytest.mark.deep
@pytest.mark.torch
@pytest.mark.skipif(not find_spec("lightning"), reason="PyTorch Lightning is not installed")
def test_lightning(said: Said) -> None:
    assert said("lightning/train.py", what="validation accuracy") > 0.8


@SPARK
@pytest.mark.jax
def test_jax(said: Said) -> None:
    assert said("jax/digits.py", "--epochs=6", what="at last") < 1


@pytest.mark.jax
def test_keras_on_jax(said: Said) -> None:
    options = ("--model-parallel", "--epochs=4")
    assert said("jax/keras_digits.py", *options, what="training accuracy") > 0.9


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("jax_hybrid.py", marks=pytest.mark.jax),
        pytest.param("torch_tensor_parallel.py", marks=[pytest.mark.torch, pytest.mark.deep]),
    ],
)
def test_meshes(said: Said, script: str) -> None:
    assert said(f"meshes/{script}", "--data=1", "--model=2", what="at last") < 0.5


@SPARK
@pytest.mark.tensorflow
def test_horovod_with_keras(said: Said, tmp_path: Path) -> None:
    assert said("horovod/keras_digits.py", what="test accuracy") > 0.9
    assert (tmp_path / "out" / "horovod" / "digits.keras").exists()


@SPARK
@pytest.mark.tensorflow
def test_streaming(said: Said, tmp_path: Path) -> None:
    out = tmp_path / "out"  # for the JVM of all tests, which is in another folder
    folders = (f"--data={out / 'stream'}", f"--checkpoint={out / 'checkpoint'}")
    assert said("streaming.py", "--once", *folders, what="accuracy over the stream") > 0.6
    assert (out / "stream.keras").exists()


@pytest.mark.tensorflow
def test_checkpoints(said: Said, tmp_path: Path) -> None:
    assert said("checkpoints.py", "--die-at=130", what="goes on at step") == 120
    kept = sorted((tmp_path / "out" / "checkpoints").iterdir())
    assert [path.name.split("-")[1] for path in kept] == ["0000000120", "0000000300", "0000000320"]


@SPARK
@pytest.mark.torch
def test_horovod(said: Said) -> None:
    assert said("horovod/torch_digits.py", "--fp16-allreduce", what="test accuracy") > 0.85


@pytest.mark.torch
def test_elastic_horovod(said: Said) -> None:
    assert said("horovod/elastic_digits.py", "--die-at=47", what="goes on at step") == 40
