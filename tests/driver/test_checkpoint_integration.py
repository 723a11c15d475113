"""Checkpoints of whole clusters: made, kept, gone on from; what fails leaves those before it."""

from __future__ import annotations

import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from sparkdl.core.errors import CheckpointError, NodeFailedError
from sparkdl.core.options import Feeding, Recovery
from sparkdl.node.checkpoint_store import open_store
from sparkdl.node.context import NodeContext
from tests.doubles import ledger
from tests.doubles.nodes import SOON_S, launch

UNFED = Feeding(fed=False)


def steps_in(folder: Path) -> list[int]:
    """The steps of all that is in the folder, unfinished ones below zero."""
    names = sorted(os.listdir(folder), key=lambda name: name.lstrip("."))
    return [int(name.split("-")[1]) * (-1 if name.startswith(".") else 1) for name in names]


def test_job_that_is_launched_again_goes_on_at_the_newest_checkpoint(tmp_path: Path) -> None:
    def train(args: None, ctx: NodeContext) -> Any:
        last = ctx.last_checkpoint
        first = last.step + 1 if last else 1
        read = Path(last, f"part-{ctx.rank}").read_text() if last else ""
        for step in range(first, first + 3):
            with ctx.checkpoint(step) as folder:
                (folder / f"part-{ctx.rank}").write_text(f"{step}")
                (folder / "deep").mkdir(exist_ok=True)
        return last and (last.step, str(last.folder)), read

    folder = tmp_path / "checkpoints"
    options: dict[str, Any] = {"recovery": Recovery(keep_checkpoints=2), "feeding": UNFED}
    with launch(train, checkpoint_dir=str(folder), **options) as cluster:
        assert cluster.results(SOON_S) == [(None, "")] * 2
        recorded = cluster._controller.view.state.registry.checkpoint  # type: ignore[union-attr]
        assert recorded is not None
    assert steps_in(folder) == [2, 3]
    newest = folder / f"step-0000000003-{cluster.spec.cluster_id}-0"
    assert recorded.url == f"file://{newest}"
    assert sorted(os.listdir(newest)) == ["deep", "manifest.json", "part-0", "part-1"]

    half, torn = folder / ".step-0000000009-dead-0", folder / "step-0000000008-dead-0"
    for unfinished in (half, torn):
        unfinished.mkdir()
        (unfinished / "weights").write_text("half")
    (torn / "manifest.json").write_text('{"step": 8, "clus')
    with launch(train, checkpoint_dir=f"file:{folder}", **options) as cluster:
        assert cluster.results(SOON_S) == [((3, str(newest)), "3")] * 2
    assert steps_in(folder) == [3, 5, 6], "what was unfinished is gone, and the base is not"


def test_full_disk_leaves_the_checkpoints_before_it(tmp_path: Path) -> None:
    def train(args: None, ctx: NodeContext) -> Any:
        with ctx.checkpoint(1) as folder:
            (folder / f"part-{ctx.rank}").write_bytes(b"1")
        problems: list[Any] = []
        if ctx.rank == 1:  # what it says has to reach the first node
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            with ctx.checkpoint(2) as folder:
                (folder / f"part-{ctx.rank}").write_bytes(b"2" * (10_000 * ctx.rank))
        except CheckpointError as error:
            problems += [str(error), type(error.__cause__).__name__]
        if ctx.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        left = sorted(os.listdir(args))
        with ctx.checkpoint(3) as folder:
            (folder / f"part-{ctx.rank}").write_bytes(b"3")
        return problems, left

    with launch(train, str(tmp_path), checkpoint_dir=str(tmp_path), feeding=UNFED) as cluster:
        (first, left), (second, _) = cluster.results(SOON_S)
    name = f"step-000000000{{}}-{cluster.spec.cluster_id}-0".format
    assert "worker:1 could not write its part: CheckpointError" in first[0]
    assert "File too large" in first[0]
    assert "the checkpoint of step 2 could not be written to file://" in second[0]
    assert second[1] == "OSError"
    assert name(1) in left
    assert f".{name(2)}" not in left, "its room is free again"
    assert steps_in(tmp_path) == [1, 3]
    found = open_store(str(tmp_path)).newest()
    assert found is not None
    assert found.manifest.files == {"part-0": 1, "part-1": 1}


def test_chief_that_dies_after_the_rename_has_made_the_next_jobs_checkpoint(tmp_path: Path) -> None:
    def train(args: None, ctx: NodeContext) -> Any:
        with ctx.checkpoint(1) as folder:
            (folder / "model").write_text("1")
        # The end comes in place of the message that the checkpoint is complete.
        store = ctx._checkpoints._store
        store.commit = dying(store.commit)  # type: ignore[method-assign]
        with ctx.checkpoint(2) as folder:
            (folder / "model").write_text("2")

    def dying(commit: Any) -> Any:
        def commit_and_die(*args: Any) -> None:
            commit(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        return commit_and_die

    options: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "nodes": 1, "feeding": UNFED}
    with pytest.raises(NodeFailedError), launch(train, **options) as cluster:
        with pytest.raises(NodeFailedError):
            cluster.wait(SOON_S)
        registry = cluster._controller.view.state.registry  # type: ignore[union-attr]
        assert registry.checkpoint is not None
        assert registry.checkpoint.step == 1, "a restart of this job would go on from there"
        cluster.wait(SOON_S)
    assert steps_in(tmp_path) == [1, 2]
    found = open_store(str(tmp_path)).newest()
    assert found is not None
    assert found.manifest.step == 2


def test_node_killed_between_begin_and_commit_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    plan = ledger.Plan(every=4, stuck_at=8, faults=((0, 1, 10, "SIGKILL"),))
    with launch(ledger.train, plan, checkpoint_dir=str(tmp_path), max_restarts=1) as cluster:
        report = cluster.feed(ledger.table(320))
        parts = cluster.results(SOON_S)
    assert report.rows_covered == 4 * 2 * ledger.BATCH
    assert ledger.lost_and_doubled(parts, 320) == (0, 0)
    assert min(steps_in(tmp_path)) == 4, "nothing is half"


@pytest.mark.smoke
@pytest.mark.torch
@pytest.mark.timeout(300)
def test_training_goes_on_while_pytorch_saves_and_its_end_waits(tmp_path: Path) -> None:
    def train(args: Any, ctx: NodeContext) -> Any:
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch import full

        class SlowWriter(dcp.FileSystemWriter):  # type: ignore[misc]  # imported late
            def write_data(self, *given: Any) -> Any:
                return go.wait(SOON_S) and super().write_data(*given)

        go, state = threading.Event(), {"shared": full([], 0.0), f"own-{ctx.rank}": full([], 1.0)}
        dist.init_process_group("gloo")
        if last := ctx.last_checkpoint:
            dcp.load(state, checkpoint_id=last.folder)
            return [float(value) for value in state.values()]
        with ctx.checkpoint_async(1) as saving:
            writer, group = SlowWriter(saving.folder), dist.new_group(backend="gloo")
            saving.until(dcp.async_save(state, storage_writer=writer, process_group=group))
        for value in state.values():
            dist.all_reduce(value.add_(1))
        assert steps_in(args) == [-1]
        return go.set()

    options: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "feeding": UNFED}
    for expected in (None, [0.0, 1.0]):
        with launch(train, tmp_path, framework="torch", **options) as cluster:
            assert cluster.results(120) == [expected] * 2
