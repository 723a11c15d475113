"""Three strangers' ways through the documentation, each walked as its page says.

The first has a program for TensorFlowOnSpark (docs/migrating.md), the second a PyTorch loop and a
Parquet table (docs/pytorch.md), the third a training that hangs at night (docs/hangs.md).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doubles.programs import output_of

MIGRATING = Path(__file__).parents[2] / "docs" / "migrating.md"
BIN = Path(sys.executable).parent
TFOS = Path(__file__).parents[1] / "tfos" / "programs" / "mnist_spark.py"
SUBMIT = (BIN / "spark-submit", "--master", "local[4]", "--conf", "spark.ui.enabled=false")
DEADLINE_S = 240.0

PYTORCH = """
import sys

from pyspark.sql import SparkSession

import sparkdl


def train(args, ctx):
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    data = ctx.torch_dataset(64, x="image", y="label", shuffle=True)
    for epoch in range(5):
        for x, y in torch.utils.data.DataLoader(data, batch_size=None):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    return loss.item()


spark = SparkSession.builder.getOrCreate()
df = spark.read.parquet(sys.argv[1])
with sparkdl.launch(spark, train, nodes=2, framework="torch") as cluster:
    cluster.feed(df, epochs=5)
    print("losses", *cluster.results())
"""

HANGS = """
import time

import sparkdl


def read_from_a_dead_mount():
    time.sleep(3600)


def train(args, ctx):
    for step in range(20):
        ctx.report(step=step)
        if step == 10 and ctx.rank == 1 and not ctx.restarts:
            read_from_a_dead_mount()
    return step


if __name__ == "__main__":
    recovery = sparkdl.Recovery(hang_timeout_s=30, on_hang="restart")
    values = sparkdl.run(
        None, train, nodes=2, framework="plain", executor="local", max_restarts=1, recovery=recovery
    )
    print("finished at steps", *values)
"""

pytestmark = [pytest.mark.deep, pytest.mark.timeout(300), pytest.mark.usefixtures("run_name")]


@pytest.mark.spark
@pytest.mark.tensorflow
def test_i_have_tensorflowonspark_code(tmp_path: Path) -> None:
    program = tmp_path / "my_program.py"
    program.write_text(TFOS.read_text())
    commands = re.search(r"^sed (-Ei) '(.*?)' my_program.py$", MIGRATING.read_text(), re.S | re.M)
    assert commands is not None
    for _ in range(2):  # the second time it changes nothing
        output_of("sed", *commands.groups(), program)
    assert "from sparkdl.tfos import" in program.read_text()
    arguments = (program, "--export_dir", tmp_path / "model", "--epochs", "2")
    env = {"PYSPARK_PYTHON": sys.executable}
    output_of(*SUBMIT, *arguments, cwd=tmp_path, env=env, timeout_s=DEADLINE_S)
    assert (tmp_path / "model" / "saved_model.pb").is_file()


@pytest.mark.spark
@pytest.mark.torch
def test_i_have_a_pytorch_script_and_a_parquet_table(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = pa.array([*(images / 16).astype("float32")], pa.list_(pa.float32()))
    pq.write_table(pa.table({"image": images, "label": labels}), tmp_path / "digits.parquet")
    program = tmp_path / "train.py"
    program.write_text(PYTORCH)
    env = {"PYSPARK_PYTHON": sys.executable}
    command = (*SUBMIT, program, tmp_path / "digits.parquet")
    said = output_of(*command, cwd=tmp_path, env=env, timeout_s=DEADLINE_S)
    losses = [float(word) for word in said.partition("losses ")[2].split()]
    assert len(losses) == 2
    assert max(losses) < 1


def test_my_training_hangs_at_night(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(HANGS)
    command = (sys.executable, program)
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    said = ended.stderr + ended.stdout
    assert "in read_from_a_dead_mount" in said
    assert "for 30 s; worker:1 (rank 1) at step 10" in said  # the other one has returned
    assert "finished at steps 19 19" in said
