"""`TorchDistributor` beside pyspark's: the same function, the same values."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import sparkdl
from sparkdl.control.values import encode_value
from sparkdl.core.errors import ConfigError, NodeFailedError, ResultError, SparkConfigError
from sparkdl.node.context import current
from sparkdl.tfos import gpu_info
from sparkdl.torch_program import packed, script_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.torch

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def train(steps: int, *, lr: float) -> dict[str, Any]:
    """Train with DistributedDataParallel on this rank's rows; return model and place.

    On a node also what the feed has brought.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, y = torch.randn(64, 6)[rank::size], torch.randint(3, (64,))[rank::size]
    net = torch.nn.Linear(6, 3)
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    losses = []
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(total := loss.detach().clone())
        losses.append(total.item() / size)
    dist.destroy_process_group()
    place = {name: os.environ.get(name) for name in _NAMES}
    place["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES")
    ctx = current()
    data = ctx.torch_dataset(4, x="x") if ctx else []
    fed = [int(batch.sum()) for _ in range(2) for batch in data]
    told = ctx.all_gather([place, fed]) if ctx else [[place, fed]]
    places, rows = zip(*told, strict=True)
    return {"model": net, "losses": losses, "places": places, "fed": sum(map(sum, rows))}


@pytest.mark.deep
@pytest.mark.parametrize("processes", [1, 2])
def test_same_function_gives_pysparks_results(spark_cluster: SparkSession, processes: int) -> None:
    """Two of ours train as two of pyspark's do, or as one does with all rows."""
    import torch
    from pyspark.ml.torch.distributor import TorchDistributor

    pysparks = TorchDistributor(processes, local_mode=False, use_gpu=False)
    theirs: Any = pysparks.run(train, 3, lr=0.5)
    frame = spark_cluster.range(40).withColumnRenamed("id", "x")
    distributor = sparkdl.TorchDistributor(2, False, use_gpu=False, feed=frame, epochs=2)
    ours: Any = distributor.run(train, 3, lr=0.5)
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-6)
    sizes = {"WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
    first, second = ours["places"]
    assert first == {**theirs["places"][0], **sizes}
    other = {"RANK": "1", "GROUP_RANK": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert second == {**first, **other}
    assert isinstance(theirs["model"], torch.nn.Linear)
    for one, other in zip(ours["model"].parameters(), theirs["model"].parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert theirs["fed"] == 0
    assert ours["fed"] == 2 * sum(range(40))
    _errors_are_the_same(TorchDistributor)


def _errors_are_the_same(theirs: type) -> None:
    none: dict[str, Any] = {"num_processes": 0, "use_gpu": False}
    for bad in (none, {**none, "local_mode": False}):
        with pytest.raises((ValueError, RuntimeError)) as raised:
            theirs(**bad)
        with pytest.raises(raised.type):
            sparkdl.TorchDistributor(**bad)
    for distributor in (theirs, sparkdl.TorchDistributor):
        with pytest.raises(ValueError, match="does not support key-word"):
            distributor(1, True, False).run(__file__, a=1)


def fail_once() -> Any:
    """Count in a checkpoint; the second process fails after the first."""
    import torch.distributed as dist

    ctx = current()
    assert ctx is not None
    dist.init_process_group("gloo")
    last = ctx.last_checkpoint
    if last is None:
        with ctx.checkpoint(3) as made:
            (made / f"{ctx.rank}").write_text("here")
        dist.barrier()
        if ctx.rank:
            raise RuntimeError("once")
        dist.barrier()
    assert last is not None
    dist.barrier()  # or a rank may end while the other still connects to it, which fails then
    place = [os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]]
    kept = sorted(path.name for path in last.folder.iterdir())
    told = ctx.all_gather([last.step, kept, place, os.getpid()])
    large = "s" * 20_000_000
    return lambda: (told, large)  # which can be pickled, and is no plain value


def lock() -> Any:
    return threading.Lock()


PROGRAM = """
import os, sys
import torch.distributed as dist
from pathlib import Path

if __name__ == "__main__":
    dist.init_process_group("gloo")
    Path(sys.argv[1], f"{dist.get_rank()}").write_text(" ".join(sys.argv[2:]))
    if sys.argv[-1] == "fail":
        raise ValueError("line of the program")
"""


@pytest.mark.smoke
def test_local_mode_runs_functions_and_programs_without_spark(tmp_path: Path) -> None:
    heard: list[str] = []
    places = sparkdl.TorchDistributor(
        2,
        use_gpu=False,
        max_restarts=1,
        checkpoint_dir=str(tmp_path / "kept"),
        observe=sparkdl.Observe(on_log=lambda line: heard.append(line.text)),
    )
    (first, second), large = places.run(fail_once)()
    assert large == "s" * 20_000_000
    assert first[:-1] == [3, ["0", "1", "manifest.json"], ["0", "2"]]
    assert second[:-1] == [3, ["0", "1", "manifest.json"], ["1", "2"]]
    assert first[-1] != second[-1] != os.getpid()
    assert not any("destroy_process_group" in line for line in heard), heard

    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    alone = sparkdl.TorchDistributor(use_gpu=False, observe=sparkdl.Observe(log_to_driver=False))
    line = 'raise ValueError\\("line of the program"\\)'
    with pytest.raises(RuntimeError, match=line) as raised:  # as pyspark's
        alone.run(str(program), str(tmp_path), "--lr", 0.5, "fail")
    assert (tmp_path / "0").read_text() == "--lr 0.5 fail"
    assert isinstance(raised.value, NodeFailedError)


def test_program_may_end_by_sys_exit(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys\nsys.exit(int(sys.argv[1]))")
    script_of(str(program)).run(("0",))
    with pytest.raises(SystemExit, match="3"):
        script_of(str(program)).run(("3",))


def test_value_that_cannot_be_pickled_is_left_to_the_check_of_results() -> None:
    value = packed(lock(), None)
    with pytest.raises(ResultError, match=r"_thread\.lock"):
        encode_value(value)


@pytest.mark.skipif(gpu_info.is_gpu_available(), reason="there is a GPU")
def test_machine_without_gpus_is_a_runtime_error() -> None:
    with pytest.raises(RuntimeError, match="num_gpus=1") as raised:
        sparkdl.TorchDistributor(1, local_mode=True, use_gpu=True).run(lock)
    assert isinstance(raised.value, SparkConfigError)


def test_what_cannot_work_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(SparkConfigError, match="active SparkSession"):
        sparkdl.TorchDistributor(2, local_mode=False)
    distributor = sparkdl.TorchDistributor(use_gpu=False)
    with pytest.raises(ConfigError, match="cannot be read"):
        distributor.run(str(tmp_path / "none.py"))
    with pytest.raises(ConfigError, match="function or a path, not int"):
        distributor.run(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"_thread\.lock"):
        distributor.run(train, threading.Lock())
