"""Children that an agent's fork server forks, in clusters without Spark."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from sparkdl.core.options import Feeding, Startup
from sparkdl.driver.options import LogLine, Observe
from sparkdl.node.context import NodeContext
from sparkdl.node.forks import CAN_FORK
from tests.doubles.frameworks import IMPORTS_MORE, MORE
from tests.doubles.gates import Gate
from tests.doubles.nodes import SOON_S, all_gone, is_fork_server, launch, processes
from tests.doubles.until import until
from tests.node import preloaded
from tests.node.preloaded import importers

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="agents fork on Linux alone")
OPTIONS: dict[str, Any] = {
    "startup": Startup(preload=[preloaded.NAME]),
    "feeding": Feeding(fed=False),
    "max_restarts": 1,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where processes that preload leave their numbers."""
    folder = tmp_path / "preloaded"
    folder.mkdir()
    monkeypatch.setenv(preloaded.FOLDER, str(folder))
    return folder


def tell(gate: Gate, ctx: NodeContext) -> dict[str, Any]:
    """Wait in the first generation; return what a process knows of itself in the next."""
    if ctx.generation == 0:
        gate.wait()
    return {
        "generation": ctx.generation,
        "pid": os.getpid(),
        "more": MORE in sys.modules,
        "server": os.getppid(),
        "random": (random.random(), float(np.random.rand())),
        "group": os.getpgid(0),
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "multiprocessing": (
            multiprocessing.get_start_method(),
            multiprocessing.current_process().name,
            multiprocessing.parent_process(),
        ),
    }


def test_restart_forks_children_of_a_process_with_all_imports(folder: Path, tmp_path: Path) -> None:
    gate = Gate.at(tmp_path / "gate")
    with (
        launch(tell, gate, framework=IMPORTS_MORE, **OPTIONS) as cluster,
        gate.wait_until_reached(),
    ):
        before = processes(nodes=2)
        servers = [psutil.Process(each.child.ppid()) for each in before.values()]
        before["worker:1"].child.kill()
        results: list[dict[str, Any]] = cluster.results(SOON_S)
    assert [result["generation"] for result in results] == [1, 1]
    assert {result["server"] for result in results} == {each.pid for each in servers}
    assert importers(folder) == {each.pid for each in servers}
    for result in results:
        assert result["more"]
        assert result["group"] == result["pid"]
        assert result["blocked"] == set()
        method = multiprocessing.get_start_method()
        assert result["multiprocessing"] == (method, "MainProcess", None)
    assert results[0]["random"] != results[1]["random"]
    assert all_gone(servers)


@pytest.mark.smoke
def test_process_that_has_started_a_thread_is_not_forked(folder: Path) -> None:
    (folder / preloaded.STARTS_A_THREAD).touch()
    lines: list[LogLine] = []
    with launch(os_pid, nodes=1, observe=Observe(on_log=lines.append), **OPTIONS) as cluster:
        (pid,) = cluster.results(SOON_S)
    assert pid in importers(folder)
    assert len(importers(folder)) == 2
    text = "cold start, without the fork server: the imports have started threads"
    assert [line for line in lines if text in line.text]


def os_pid(args: None, ctx: NodeContext) -> int:
    return os.getpid()


def test_nothing_outlives_a_killed_agent(folder: Path, tmp_path: Path) -> None:
    gate = Gate.at(tmp_path / "gate")
    options = {**OPTIONS, "max_restarts": 1}
    with launch(tell, gate, nodes=1, **options) as cluster, gate.wait_until_reached():
        node = processes()["worker:0"]
        server = node.child.parent()
        assert server is not None
        assert is_fork_server(server)
        node.agent.kill()
        assert all_gone([node.agent, server, node.child])
        cluster.abort()


def test_server_that_hangs_in_an_import_ends_with_its_agent(folder: Path) -> None:
    (folder / preloaded.HANGS).touch()
    code = (
        "import sys; from sparkdl.node.forks import prepare_fork; "
        f"prepare_fork('plain', [{preloaded.NAME!r}], {{}}, [2]); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as agent:
        assert until(lambda: bool(importers(folder)), SOON_S)
        servers = [psutil.Process(pid) for pid in importers(folder)]
        agent.kill()
        assert all_gone(servers)


def test_node_whose_server_cannot_listen_starts_cold_children(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    with launch(os_pid, nodes=1, **OPTIONS) as cluster:
        (pid,) = cluster.results(SOON_S)
    assert importers(folder) == {pid}


def imported_more(args: None, ctx: NodeContext) -> tuple[bool, bool]:
    return "torch._dynamo" in sys.modules, is_fork_server(psutil.Process(os.getppid()))


@pytest.mark.deep
@pytest.mark.torch
def test_forks_have_what_optimizers_import_at_their_first_step() -> None:
    options = {"feeding": Feeding(fed=False), "max_restarts": 1}
    with launch(imported_more, nodes=1, framework="torch", **options) as cluster:
        assert cluster.results(SOON_S) == [(True, True)]
