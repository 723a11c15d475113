"""`horovod.spark.run` on Spark, and what there is without it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import sparkdl.horovod
from sparkdl.core.errors import ConfigError
from sparkdl.horovod.spark import run, run_elastic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def total(base: int) -> tuple[int, float]:
    import torch

    import sparkdl.horovod.torch as hvd
    from sparkdl.horovod.spark.task import get_available_devices

    hvd.init()
    assert isinstance(get_available_devices(), list)
    layer = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0))
    layer(torch.ones(1, 1)).backward()
    optimizer.step()
    return hvd.rank(), float(hvd.allreduce(torch.tensor(float(base + hvd.rank())), op=hvd.Sum))


@pytest.mark.torch
def test_run_takes_the_active_session(spark_local: SparkSession) -> None:
    assert run(total, args=(5,), num_proc=2, verbose=0) == [(0, 11.0), (1, 11.0)]


def test_run_without_a_session_says_so() -> None:
    from pyspark import SparkContext

    if SparkContext._active_spark_context is None:
        with pytest.raises(ConfigError, match="no active SparkContext"):
            run_elastic(total, num_proc=2)


@pytest.mark.torch
def test_run_of_one_machine_needs_no_spark() -> None:
    assert sparkdl.horovod.run(total, (3,), np=1, show_progress=False) == [(0, 3.0)]
    for refused in ("host_discovery_script", "use_mpi", "output_filename"):
        with pytest.raises(ConfigError, match=refused):
            sparkdl.horovod.run(total, (3,), **{refused: "there"})


@pytest.mark.torch
def test_process_that_sparkdl_has_not_started_is_alone() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    import sparkdl.horovod.torch as hvd

    hvd.init(process_sets="dynamic")
    try:
        place = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size(), hvd.join())
        assert place == (0, 1, 0, 1, 0)
        x = torch.arange(3.0, requires_grad=True)
        assert hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0).tolist() == [0, 2, 4]
        assert hvd.allgather(x).tolist() == hvd.broadcast(x, 0).tolist() == [0, 1, 2]
        moved: Any = hvd.alltoall(x)
        assert moved.tolist() == hvd.reducescatter(x).tolist() == [0, 1, 2]
        assert hvd.synchronize(hvd.allreduce_async_(x.detach())).tolist() == [0, 1, 2]
        assert hvd.allgather_object("it") == ["it"]
        hvd.barrier()
        hvd.shutdown()
        with pytest.raises(ConfigError, match="uses no MPI"):
            hvd.init(comm=object())
        with pytest.raises(ConfigError, match="use process_sets"):
            hvd.init(comm=[0, 1])
    finally:
        hvd.shutdown()


@pytest.mark.torch
def test_program_for_horovod_runs_after_one_change(tmp_path: Path) -> None:
    text = (Path(__file__).parent / "programs" / "mnist_style.py").read_text(encoding="utf-8")
    program = tmp_path / "program.py"
    program.write_text(re.sub(r"\bhorovod\b", "sparkdl.horovod", text), encoding="utf-8")
    said = []
    for args in (["--num-proc=2", "--hosts=localhost:2"], [], ["--use-adasum"]):
        done = subprocess.run(
            [sys.executable, str(program), *args],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        said.append(done.stdout + done.stderr)
    for text, size in zip(said, (2, 1), strict=False):
        found = re.search(rf"accuracy ([\d.]+) on {size}$", text, re.MULTILINE)
        assert found, text
        assert float(found[1]) > 0.9
    assert "models are the same: True" in said[0]
    assert "hvd.Adasum: sparkdl does not adapt gradients by their angles" in said[2]
