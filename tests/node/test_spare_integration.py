"""Children that take over at a restart with their libraries imported; clusters without Spark."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sparkdl.core.deadline import Deadline
from sparkdl.core.options import Observe, Startup
from sparkdl.driver.handle import Cluster
from sparkdl.driver.view import View
from sparkdl.node.context import NodeContext
from tests.doubles import preloaded
from tests.doubles.frameworks import LOSES_PORTS
from tests.doubles.gates import Gate
from tests.doubles.nodes import SOON_S, Lines, all_gone, launch, processes
from tests.doubles.preloaded import imported_spare, importers


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where processes that preload leave their numbers."""
    folder = tmp_path / "preloaded"
    folder.mkdir()
    monkeypatch.setenv(preloaded.FOLDER, str(folder))
    return folder


def in_world(generation: int) -> Callable[[View], bool]:
    """Whether both nodes have reported a step in this world."""

    def have_stepped(view: View) -> bool:
        steps = [one for one in view.activity.values() if one.generation == generation]
        return len(steps) == 2 and all(one.step >= 0 for one in steps)

    return have_stepped


def wait_for(cluster: Cluster, is_true: Callable[[View], bool]) -> None:
    assert cluster._controller.wait_for(is_true, Deadline.after(2 * SOON_S))


@dataclass(frozen=True)
class Traced:
    """Leaves a file with the number of each process that unpickles it."""

    folder: str

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        Path(self.folder, f"user code in {os.getpid()}").touch()


def tell(args: Traced, ctx: NodeContext) -> dict[str, Any]:
    """Take a step, and hang in the first two worlds; return what a process knows of itself."""
    ctx.report(step=1)
    if ctx.generation < 2:
        signal.pause()
    threads = map(int, os.listdir("/proc/self/task"))
    return {
        "pid": os.getpid(),
        "world": [ctx.generation, ctx.rank, os.environ["ROUND"], os.environ["SPARKDL_NODE"]],
        "policies": sorted({os.sched_getscheduler(thread) for thread in threads}),
        "oom": Path("/proc/self/oom_score_adj").read_text(),
    }


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_each_restart_trains_in_children_that_had_imported_before_the_kill(folder: Path) -> None:
    options: dict[str, Any] = {
        "framework": LOSES_PORTS,
        "startup": Startup(preload=[preloaded.NAME]),
    }
    nodes = ("worker:0", "worker:1")
    with launch(tell, Traced(str(folder)), max_restarts=2, **options) as cluster:
        seen = {node.child.pid for node in processes().values()}
        for generation in range(2):
            wait_for(cluster, in_world(generation))
            spares = {node: imported_spare(node, folder).pid for node in nodes}
            assert not seen & set(spares.values()), "a spare is used once"
            seen |= set(spares.values())
            assert importers(folder) == seen
            assert not any((folder / f"user code in {pid}").exists() for pid in spares.values())
            processes()["worker:1"].child.kill()
        results = cluster.results(3 * SOON_S)
    assert [result["pid"] for result in results] == list(spares.values())
    assert [result["world"] for result in results] == [
        [2, rank, "2", node] for rank, node in enumerate(nodes)
    ]
    for result in results:
        assert result["policies"] == [os.sched_getscheduler(0)]
        assert result["oom"] == Path("/proc/self/oom_score_adj").read_text()


def hang_after_a_step(args: Any, ctx: NodeContext) -> int:
    ctx.report(step=1)
    if ctx.generation == 0:
        signal.pause()
    return os.getpid()


def test_spare_stands_back_and_ends_with_its_agent(folder: Path) -> None:
    with launch(
        hang_after_a_step, nodes=1, max_restarts=1, startup=Startup(preload=[preloaded.NAME])
    ) as cluster:
        spare = imported_spare("worker:0", folder)
        if sys.platform == "linux":
            assert os.sched_getscheduler(spare.pid) in (os.SCHED_IDLE, os.SCHED_BATCH)
            assert Path(f"/proc/{spare.pid}/oom_score_adj").read_text() == "1000\n"
        processes()["worker:0"].agent.kill()
        assert all_gone([spare])
        cluster.abort()


def test_no_spare_is_made_where_it_is_turned_off() -> None:
    with launch(
        hang_after_a_step, nodes=1, max_restarts=1, startup=Startup(spare=False)
    ) as cluster:
        assert cluster.reported(timeout_s=SOON_S)[0] == 1, "the agent heard of it first"
        assert processes()["worker:0"].spare is None
        cluster.abort()


@pytest.mark.parametrize(
    "how", ["cannot import", pytest.param("is killed", marks=pytest.mark.deep)]
)
def test_spare_that_ends_is_told_in_the_log_and_harms_no_training(
    how: str, folder: Path, tmp_path: Path
) -> None:
    def train(args: Gate, ctx: NodeContext) -> list[int]:
        ctx.report(step=1)
        if ctx.generation == 0:
            args.wait()
            (folder / preloaded.FAILS).unlink(missing_ok=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return [ctx.generation, os.getpid()]

    if how == "cannot import":
        (folder / preloaded.FAILS).touch()
    gate, lines = Gate.at(tmp_path / "gate"), Lines()
    told = "sparkdl: no process with imported libraries is kept for a restart: "
    options: dict[str, Any] = {
        "observe": Observe(on_log=lines),
        "startup": Startup(preload=[preloaded.NAME]),
    }
    with launch(train, gate, 1, max_restarts=1, **options) as cluster:
        if how == "cannot import":
            lines.wait_for_part(
                f"{told}sparkdl.core.errors.ConfigError: preload names '{preloaded.NAME}'"
            )
        else:
            imported_spare("worker:0", folder).kill()
            lines.wait_for_part(f"{told}it was ended by SIGKILL")
        before = importers(folder)
        gate.open()
        ((generation, pid),) = cluster.results(3 * SOON_S)
    assert generation == 1
    assert pid not in before
