"""Children and agents that an executor's zygote forks, on this machine; clusters without Spark."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import NodeFailedError
from sparkdl.core.options import Startup
from sparkdl.driver.handle import Cluster
from sparkdl.driver.options import Observe
from sparkdl.driver.view import View
from sparkdl.node.context import NodeContext
from sparkdl.node.forking import CAN_FORK
from tests.doubles import preloaded
from tests.doubles.frameworks import LOSES_PORTS
from tests.doubles.nodes import SOON_S, Lines, all_gone, launch, processes
from tests.doubles.preloaded import importers
from tests.doubles.until import until

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="zygotes are for Linux")

ZYGOTE = "sparkdl.node.zygote"


def zygotes() -> dict[int, psutil.Process]:
    """Return the zygotes whose executor this process is."""
    owner = f'"owner_pid":{os.getpid()},'
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if ZYGOTE in words and owner in words[-1]:
            found[process.pid] = process
    return found


@pytest.fixture(autouse=True)
def _end_all() -> Iterator[None]:
    yield
    for zygote in zygotes().values():
        zygote.kill()
    assert all_gone(zygotes().values())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where processes that preload leave their numbers."""
    folder = tmp_path / "preloaded"
    folder.mkdir()
    monkeypatch.setenv(preloaded.FOLDER, str(folder))
    return folder


def tell(args: Any, ctx: NodeContext) -> dict[str, Any]:
    """Take a step, and hang in the generations before `args`; return what a process knows."""
    ctx.report(step=1)
    if ctx.generation < (args or 0):
        signal.pause()
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "world": [ctx.generation, ctx.rank, os.environ.get("ROUND"), os.environ["SPARKDL_NODE"]],
        "mode": os.environ.get("MODE"),
        "random": [random.random(), float(np.random.rand())],
        "group": os.getpgid(0),
        "fds": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)),
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
    }


def run(
    args: Any = None, nodes: int = 2, observe: Observe = Observe(), **startup: Any
) -> list[dict[str, Any]]:
    kept = Startup(**{"keep_warm_s": 60.0, **startup})
    with launch(tell, args, nodes, observe=observe, startup=kept) as cluster:
        results: list[dict[str, Any]] = cluster.results(3 * SOON_S)
    return results


def wait_for_step(cluster: Cluster, generation: int, nodes: int = 2) -> None:
    def have_stepped(view: View) -> bool:
        steps = [one for one in view.activity.values() if one.generation == generation]
        return len(steps) == nodes and all(one.step >= 0 for one in steps)

    assert cluster._controller.wait_for(have_stepped, Deadline.after(2 * SOON_S))


def forks_agents(zygote: int) -> bool:
    """Whether a zygote has imported what agents need."""
    own = set()
    for fd in Path(f"/proc/{zygote}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            own.add(os.readlink(str(fd)))
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return any(s[-1].endswith("-agents") and f"socket:[{s[6]}]" in own for s in sockets)


def parents(results: list[dict[str, Any]]) -> set[int]:
    return {result["parent"] for result in results}


def test_restarts_fork_children_of_what_one_process_has_imported(folder: Path) -> None:
    options: dict[str, Any] = {
        "framework": LOSES_PORTS,
        "startup": Startup(preload=[preloaded.NAME]),
    }
    with launch(tell, 2, max_restarts=2, **options) as cluster:
        seen: set[int] = set()
        for generation in range(2):
            wait_for_step(cluster, generation)
            seen |= {node.child.pid for node in processes().values()}
            processes()["worker:1"].child.kill()
        results = cluster.results(3 * SOON_S)
    assert len(seen) == 4
    assert importers(folder) == parents(results), "one import for all"
    assert [result["world"] for result in results] == [
        [2, rank, "2", node] for rank, node in enumerate(["worker:0", "worker:1"])
    ]
    for result in results:
        assert result["pid"] not in seen
        assert result["group"] == result["pid"]
        assert result["fds"][0] == "/dev/null"
        assert not result["blocked"]
    assert len({number for result in results for number in result["random"]}) == 4
    assert all_gone(zygotes().values()), "nothing is kept where it was not asked for"


def test_next_launch_finds_the_zygote_until_something_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (zygote,) = parents(run())
    assert until(lambda: forks_agents(zygote))
    with launch(tell, 1, startup=Startup(keep_warm_s=60.0)) as cluster:
        wait_for_step(cluster, 0)
        for node in processes().values():
            assert (node.agent.ppid(), node.child.ppid()) == (zygote, zygote)
        cluster.abort()
    assert parents(run()) == {zygote}
    monkeypatch.setenv("MODE", "other")
    others = run()
    assert {result["mode"] for result in others} == {"other"}
    assert zygotes().keys() == {zygote, *parents(others)}
    assert zygote not in parents(others)


def test_child_starts_cold_where_a_fork_is_not_safe_and_the_log_says_why(folder: Path) -> None:
    lines = Lines()
    (folder / preloaded.STARTS_A_THREAD).touch()
    (result,) = run(nodes=1, observe=Observe(on_log=lines), preload=[preloaded.NAME])
    lines.wait_for_part("sparkdl: this process imports by itself: the imports have started threads")
    assert result["pid"] in importers(folder)
    assert result["parent"] not in zygotes()


def test_module_that_cannot_be_preloaded_is_named_by_a_cold_child(folder: Path) -> None:
    (folder / preloaded.FAILS).touch()
    with pytest.raises(NodeFailedError, match=f"names '{preloaded.NAME}'.*as asked"):
        run(nodes=1, preload=[preloaded.NAME])


@pytest.mark.parametrize("agents_are", ["stopped", "killed"])
def test_zygote_whose_import_hangs_ends_with_its_agents(folder: Path, agents_are: str) -> None:
    (folder / preloaded.HANGS).touch()
    startup = Startup(preload=[preloaded.NAME], keep_warm_s=60.0)
    with launch(tell, startup=startup) as cluster:
        until(lambda: bool(importers(folder)))
        (zygote,) = zygotes().values()
        assert importers(folder) == {zygote.pid}
        assert "is being imported" in cluster.stacks()["worker:0"]
        if agents_are == "killed":
            for process in psutil.Process().children():
                if "sparkdl.node.agent" in process.cmdline():
                    process.kill()
            assert all_gone([zygote], within_s=5.0)
        cluster.abort()
    assert all_gone([zygote], within_s=5.0)


def test_agents_of_a_zygote_that_has_died_end_well_and_know_not_how_their_child_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (pid,) = parents(run(nodes=1))
    assert until(lambda: forks_agents(pid))
    with launch(tell, 1, 1, max_restarts=1, startup=Startup(keep_warm_s=60.0)) as cluster:
        wait_for_step(cluster, 0, nodes=1)
        node, zygote = processes()["worker:0"], zygotes()[pid]
        assert node.agent.ppid() == pid
        zygote.kill()
        assert all_gone([zygote])
        assert processes()["worker:0"].child == node.child, "the training goes on"
        node.child.kill()
        results = cluster.results(3 * SOON_S)
    assert parents(results) == zygotes().keys()
    assert "failed: its exit status is unknown, because its zygote" in caplog.text


def test_child_ends_with_its_agent_and_the_others_zygote_stays() -> None:
    with launch(tell, 1, max_restarts=1) as cluster:
        wait_for_step(cluster, 0)
        (zygote,) = zygotes().values()
        node = processes()["worker:0"]
        node.child.suspend()  # it cannot end by itself
        node.agent.kill()
        assert all_gone([node.child])
        assert parents(cluster.results(3 * SOON_S)) == {zygote.pid}


def test_zygote_that_is_not_needed_in_time_ends() -> None:
    run(nodes=1, keep_warm_s=0.2)
    assert all_gone(zygotes().values())


@pytest.mark.parametrize("has_agents", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_file_that_has_changed_since_is_imported_once_for_all_restarts(
    has_agents: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imports, module = tmp_path / "imports", tmp_path / "changes_for_a_test.py"
    module.write_text(f"print('old', file=open({str(imports)!r}, 'a'))\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    startup = Startup(preload=[module.stem], keep_warm_s=60.0)
    with launch(tell, nodes=1, startup=startup) as cluster:
        (zygote,) = parents(cluster.results(3 * SOON_S))
    if has_agents:
        until(lambda: forks_agents(zygote))
    module.write_text(module.read_text().replace("old", "changed"))
    with launch(tell, 2, nodes=1, max_restarts=2, startup=startup) as cluster:
        for generation in range(2):
            wait_for_step(cluster, generation, nodes=1)
            processes()["worker:0"].child.kill()
        assert parents(cluster.results(3 * SOON_S)) == zygotes().keys()
    assert imports.read_text().split() == ["old", "changed"]


DRIVER = """
import os, sys
from tests.node.test_zygote import run, zygotes
run(nodes=1)
print(*zygotes(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["killed", pytest.param("ends", marks=pytest.mark.deep)])
def test_zygote_ends_with_its_executor(how: str) -> None:
    command = [sys.executable, "-c", DRIVER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdin is not None
        (pid,) = driver.stdout.readline().split()
        zygote = psutil.Process(int(pid))
        if how == "killed":
            driver.kill()
        driver.stdin.close()
        assert all_gone([zygote])
