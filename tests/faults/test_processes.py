"""A process dies, is stopped, or gets nothing more: each row is in the model as often as fed."""

from __future__ import annotations

import ctypes
import json
import logging
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import NodeFailedError
from sparkdl.core.options import Recovery
from sparkdl.driver.lifecycle.state import Running
from sparkdl.node.context import NodeContext
from tests.doubles.ledger import Plan, lost_and_doubled, table, train
from tests.doubles.nodes import SOON_S, all_gone, launch, processes, use_settings
from tests.doubles.until import until
from tests.faults.soak import PROGRAM, soak

FAULTS = ((0, 1, 2, "SIGKILL"), (1, 0, 18, "segfault"))
"""The first before there is any checkpoint."""


def train_and_export(plan: Plan, ctx: NodeContext) -> list[int]:
    """Train; raise, the first time that there is nothing left to read."""
    seen = train(plan, ctx)
    if (ctx.generation, ctx.rank) == (len(FAULTS), 1):
        raise ValueError("the model cannot be exported")
    return seen


def test_child_that_dies_in_an_epoch_or_raises_after_the_loop_loses_no_row(tmp_path: Path) -> None:
    """Rows behind the checkpoint come again, also of a call of `feed` that is over."""
    rows = 2 * 8 * 13 + 3
    plan, restarts = Plan(faults=FAULTS), len(FAULTS) + 1
    options: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "max_restarts": restarts}
    with launch(train_and_export, plan, **options) as cluster:
        assert cluster.feed(table(rows, 3), epochs=2).rows_used == 2 * rows
        results = cluster.results(3 * SOON_S)
        assert cluster.world.generation == restarts
        assert f"restart {restarts} because worker:1" in cluster.status()
    assert lost_and_doubled(results, rows, epochs=2) == (0, 0)


def test_rest_of_an_epoch_for_fewer_nodes_than_there_are_waits_for_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 dies when the checkpoint of the last full step of an epoch is complete.

    A synchronous step needs a row on each node. The rest of the last epoch is unused.
    """
    nodes, steps = 3, 4
    rows = nodes * 8 * steps + 1
    faults = ((0, 0, steps + 1, "SIGKILL"), (1, 0, 2 * steps + 1, "os._exit"))
    options: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "max_restarts": 2}
    with launch(train, Plan(every=steps, faults=faults), nodes, **options) as cluster:
        report = cluster.feed(table(rows, 2), epochs=2)
        results = cluster.results(3 * SOON_S)
        assert cluster.world.generation == len(faults)
    assert report.rows_fed == 2 * rows
    assert lost_and_doubled(results, rows, epochs=2) == (2, 0)
    # The call may have returned before the second death: then there is nobody else to tell.
    assert report.rows_unused == 2 or "2 replayed rows of an earlier call" in caplog.text


def test_stopped_child_loses_no_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = 2 * 8 * 20
    options: dict[str, Any] = {
        "max_restarts": 9,
        "recovery": Recovery(hang_timeout_s=2.0, on_hang="fail"),
    }
    with launch(train, Plan(pause_s=0.03), checkpoint_dir=str(tmp_path), **options) as cluster:
        feeding = cluster.feed_async(table(rows, 3))
        child = processes(nodes=2)["worker:1"].child
        # Stopped before it enters map_fun, a node would have longer than the hang timeout.
        assert cluster._controller.wait_for(
            lambda view: (1, "input") in view.feeds and view.feeds[1, "input"].given.steps > 0,
            Deadline.after(SOON_S),
        )
        child.suspend()
        feeding.result(3 * SOON_S)
        results = cluster.results(3 * SOON_S)
    assert lost_and_doubled(results, rows) == (0, 0)
    assert not child.is_running()
    found = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert any(f"process {child.pid} is stopped (SIGSTOP)" in text for text in found)


@pytest.mark.smoke
def test_stopped_agent_is_lost_after_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_settings(monkeypatch, lease_s=1.5)
    monkeypatch.setattr("sparkdl.driver.executors.local._KILL_WAIT_S", 0.5)
    rows, gone_s = 2 * 8 * 20, list[float]()

    def watch(process: psutil.Process) -> None:
        all_gone([process], 3 * SOON_S)  # its agent cannot reap it
        gone_s.append(time.monotonic())

    plan = Plan(pause_s=0.03)
    with launch(train, plan, checkpoint_dir=str(tmp_path), max_restarts=9) as cluster:
        feeding = cluster.feed_async(table(rows, 3))
        pair = processes(nodes=2)["worker:1"]
        cluster._controller.wait_for(lambda view: view.progress > 3, Deadline.after(SOON_S))
        watcher = threading.Thread(target=watch, args=(pair.child,))
        watcher.start()
        pair.agent.suspend()
        assert cluster._controller.wait_for(
            lambda view: not isinstance(view.state, Running), Deadline.after(3 * SOON_S)
        )
        lost_s = time.monotonic()
        watcher.join()
        assert gone_s[0] < lost_s
        feeding.result(3 * SOON_S)
        results = cluster.results(3 * SOON_S)
    assert lost_and_doubled(results, rows) == (0, 0)


FORGET = """
import os
from sparkdl.core.errors import FeedClosedError
from sparkdl.feed.store.spool import Spool

def forgetful(stock, way, *window):
    try:
        os.close(os.open({folder!r} + "/" + way, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return stock(*window)
    raise FeedClosedError("rows are not in the spool")

Spool.lend = lambda *window: os.open("", 0)  # as if nodes were on several hosts
for way in ("take", "read"):
    stock = getattr(Spool, way)
    setattr(Spool, way, lambda *window, of=(stock, way): forgetful(*of, *window))
"""


def test_agent_without_rows_that_it_was_brought_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for its own child, and once for the agent of another node: they are fed again."""
    (tmp_path / "sitecustomize.py").write_text(FORGET.format(folder=str(tmp_path)))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    rows, checkpoints = 2 * 8 * 13, str(tmp_path / "checkpoints")
    with launch(train, Plan(), checkpoint_dir=checkpoints, max_restarts=2) as cluster:
        cluster.feed(table(rows), epochs=2)
        results = cluster.results(3 * SOON_S)
        assert (tmp_path / "take").exists()
        assert (tmp_path / "read").exists()
        assert cluster.world.generation in (1, 2), "both ways may fail at once"
    assert "rows are not in the spool" in caplog.text
    assert lost_and_doubled(results, rows, epochs=2) == (0, 0)


def begin(folder: Path) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    arguments = [str(folder), str(2 * 8 * 10), "2", "1", "0.02"]
    driver = subprocess.Popen(
        [sys.executable, str(PROGRAM), *arguments], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout
    return driver, [psutil.Process(pid) for pid in json.loads(driver.stdout.readline())]


def test_nodes_of_a_killed_driver_end_and_its_job_goes_on_at_the_checkpoint(tmp_path: Path) -> None:
    first, them = begin(tmp_path)
    with first:
        assert until(lambda: [*tmp_path.glob("step-*/manifest.json")])
        first.kill()
        assert all_gone(them)
    left = sorted(tmp_path.glob("step-*"))
    assert left
    assert all((folder / "manifest.json").exists() for folder in left)
    second, _ = begin(tmp_path)
    with second:
        out, _ = second.communicate(timeout=6 * SOON_S)
    assert json.loads(out.splitlines()[-1]) == {"lost": 0, "doubled": 0, "generation": 0}


def gather(args: Any, ctx: NodeContext) -> list[int]:
    return [int(sum(ctx.all_gather(step))) for step in range(3)]


@pytest.mark.smoke
def test_driver_within_one_call_that_keeps_pythons_lock_loses_nobody() -> None:
    """It is busy, in pandas for example, and not lost."""
    least_s = 4.0
    with launch(gather, nodes=2, recovery=Recovery(host_timeout_s=least_s)) as cluster:
        # Called so, a function of C keeps the lock: the driver's loop answers nobody meanwhile.
        ctypes.PyDLL(None).usleep(int(1.25 * least_s * 1e6))
        assert cluster.results(SOON_S) == [[0, 2, 4]] * 2


def print_much_and_fail(args: str, ctx: NodeContext) -> None:
    """Print beyond all pipes and limits, on a disk that takes no byte more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    for i in range(30_000):
        print(f"{i:05}" + "x" * 94)
    print("to stderr", file=sys.stderr)
    try:
        Path(args).write_text("is there room?")
    except OSError as error:
        raise ValueError(f"of another cause than: {error.strerror}") from None
    finally:  # who measures coverage writes a file at the end
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_harms_nobody_who_prints_and_hides_no_other_failure(tmp_path: Path) -> None:
    with (
        pytest.raises(NodeFailedError, match="of another cause than: File too large") as caught,
        launch(print_much_and_fail, str(tmp_path / "file"), nodes=1) as cluster,
    ):
        cluster.wait(SOON_S)
    assert caught.value.root_cause.log_tail[-2:] == ("29999" + "x" * 94, "to stderr")


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_soak_loses_nothing() -> None:
    score = soak(run_s=12.0, seed=7, wait_s=1.2)
    assert score.is_clean, str(score)
    assert score.recovered == score.injected.total() > 0, str(score)
