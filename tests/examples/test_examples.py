"""The examples, run as their first lines tell a user to run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SUBMIT = Path(sys.executable).with_name("spark-submit")
DEADLINE_S = 240.0

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("run_name")]


def said(folder: Path, program: list[str], what: str) -> float:
    """Run a program; return the number that it says behind `what`."""
    done = subprocess.run(
        program,
        cwd=folder,
        env=os.environ | {"PYSPARK_PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    found = re.search(rf"{what} ([\d.]+)$", done.stdout, re.MULTILINE)
    assert found, done.stdout[-4000:]
    return float(found[1])


def submit(script: str, *args: str) -> list[str]:
    settings = ("spark.ui.enabled=false", "spark.sql.shuffle.partitions=4")
    conf = [word for setting in settings for word in ("--conf", setting)]
    return [str(SUBMIT), "--master", "local[4]", *conf, str(EXAMPLES / script), *args]


def test_every_example_is_in_the_index_and_begins_with_the_line_that_starts_it() -> None:
    index = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for path in sorted(EXAMPLES.rglob("*.py")):
        name = path.relative_to(EXAMPLES).as_posix()
        assert f"({name})" in index, f"{name} is not in examples/README.md"
        assert re.search(rf"^    (spark-submit|python) examples/{name}", path.read_text(), re.M)


@pytest.mark.tensorflow
@pytest.mark.parametrize("step", ["single.py", "distributed.py"])
def test_segmentation_without_spark(tmp_path: Path, step: str) -> None:
    program = [sys.executable, str(EXAMPLES / "segmentation" / step), "--images=1000"]
    assert said(tmp_path, program, "intersection over union") > 0.6


@pytest.mark.spark
@pytest.mark.tensorflow
def test_segmentation_on_spark(tmp_path: Path) -> None:
    program = submit("segmentation/spark.py", "--images=1000")
    assert said(tmp_path, program, "intersection over union") > 0.6


@pytest.mark.spark
@pytest.mark.tensorflow
def test_own_data(tmp_path: Path) -> None:
    assert said(tmp_path, submit("own_data/train.py"), "test accuracy") > 0.8


@pytest.mark.spark
@pytest.mark.tensorflow
def test_tfrecords_are_trained_from_and_scored_in_parallel(tmp_path: Path) -> None:
    assert said(tmp_path, submit("tfrecords/train.py"), "training accuracy") > 0.8
    assert said(tmp_path, submit("tfrecords/inference.py"), "test accuracy") > 0.8
    assert len(list((tmp_path / "out" / "predictions").iterdir())) == 2


@pytest.mark.spark
@pytest.mark.tensorflow
def test_pipeline(tmp_path: Path) -> None:
    assert said(tmp_path, submit("pipeline.py", "--nodes=1"), "area under the curve") > 0.95


@pytest.mark.spark
@pytest.mark.tensorflow
def test_hyperparameters(tmp_path: Path) -> None:
    program = submit("hyperparameters.py", "--learning-rates", "1e-6", "0.01", "--units", "32")
    assert said(tmp_path, program, "best accuracy") > 0.9


@pytest.mark.spark
@pytest.mark.torch
def test_jobs(tmp_path: Path) -> None:
    assert said(tmp_path, submit("jobs/digits.py", "--epochs=3"), "test accuracy") > 0.9


@pytest.mark.spark
@pytest.mark.torch
def test_tuning(tmp_path: Path) -> None:
    assert said(tmp_path, submit("tuning/optuna_digits.py", "--trials=3"), "best accuracy") > 0.7


@pytest.mark.spark
@pytest.mark.torch
def test_pytorch(tmp_path: Path) -> None:
    assert said(tmp_path, submit("pytorch/train.py", "--epochs=5"), "at last") < 1


@pytest.mark.spark
@pytest.mark.torch
def test_torch_distributor(tmp_path: Path) -> None:
    program = submit("pytorch/distributor.py", "--epochs=5")
    assert said(tmp_path, program, "TorchDistributor: accuracy") > 0.9


@pytest.mark.torch
def test_pytorch_in_shards_goes_on_after_a_failure(tmp_path: Path) -> None:
    program = [sys.executable, str(EXAMPLES / "pytorch" / "sharded.py"), "--fail-at=50"]
    assert said(tmp_path, program, "FSDP2: accuracy") > 0.9


@pytest.mark.torch
def test_parameter_server_by_rpc(tmp_path: Path) -> None:
    program = [sys.executable, str(EXAMPLES / "pytorch" / "parameter_server.py")]
    assert said(tmp_path, program, "parameter server: accuracy") > 0.9


@pytest.mark.torch
@pytest.mark.skipif(not find_spec("lightning"), reason="PyTorch Lightning is not installed")
def test_lightning(tmp_path: Path) -> None:
    program = [sys.executable, str(EXAMPLES / "lightning" / "train.py")]
    assert said(tmp_path, program, "validation accuracy") > 0.8


@pytest.mark.spark
@pytest.mark.jax
def test_jax(tmp_path: Path) -> None:
    assert said(tmp_path, submit("jax/digits.py", "--epochs=6"), "at last") < 1


@pytest.mark.jax
def test_keras_on_jax(tmp_path: Path) -> None:
    program = [sys.executable, str(EXAMPLES / "jax/keras_digits.py"), "--model-parallel"]
    assert said(tmp_path, [*program, "--epochs=4"], "training accuracy") > 0.9


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("jax_hybrid.py", marks=pytest.mark.jax),
        pytest.param("torch_tensor_parallel.py", marks=pytest.mark.torch),
    ],
)
def test_meshes(tmp_path: Path, script: str) -> None:
    program = [sys.executable, str(EXAMPLES / "meshes" / script), "--data=1", "--model=2"]
    assert said(tmp_path, program, "at last") < 0.5


@pytest.mark.spark
@pytest.mark.tensorflow
def test_horovod_with_keras(tmp_path: Path) -> None:
    assert said(tmp_path, submit("horovod/keras_digits.py"), "test accuracy") > 0.9
    assert (tmp_path / "out" / "horovod" / "digits.keras").exists()


@pytest.mark.spark
@pytest.mark.tensorflow
def test_streaming(tmp_path: Path) -> None:
    assert said(tmp_path, submit("streaming.py", "--once"), "accuracy over the stream") > 0.6
    assert (tmp_path / "out" / "stream.keras").exists()


@pytest.mark.tensorflow
def test_checkpoints(tmp_path: Path) -> None:
    program = [sys.executable, str(EXAMPLES / "checkpoints.py"), "--die-at=130"]
    assert said(tmp_path, program, "goes on at step") == 120
    kept = sorted((tmp_path / "out" / "checkpoints").iterdir())
    assert [path.name.split("-")[1] for path in kept] == ["0000000120", "0000000300", "0000000320"]


@pytest.mark.spark
@pytest.mark.torch
def test_horovod(tmp_path: Path) -> None:
    program = submit("horovod/torch_digits.py", "--fp16-allreduce")
    assert said(tmp_path, program, "test accuracy") > 0.85


@pytest.mark.torch
def test_elastic_horovod(tmp_path: Path) -> None:
    program = [sys.executable, str(EXAMPLES / "horovod" / "elastic_digits.py"), "--die-at=47"]
    assert said(tmp_path, program, "goes on at step") == 40
