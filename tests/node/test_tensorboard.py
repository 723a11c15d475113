"""TensorBoard beside the first node: it answers, says why not, and ends with whatever ends."""

from __future__ import annotations

import socket
import sys
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from sparkdl.core.errors import FrameworkMissingError, LaunchError
from sparkdl.core.options import Feeding
from sparkdl.driver.options import Observe
from tests.doubles.map_funs import hang
from tests.doubles.nodes import all_gone, launch, processes

has_tensorboard = pytest.mark.skipif(
    find_spec("tensorboard") is None, reason="tensorboard is not installed"
)


@pytest.fixture(autouse=True)
def _without_tensorflow(tmp_path_factory: pytest.TempPathFactory, monkeypatch: Any) -> None:
    """Hide TensorFlow from TensorBoard, which starts in a moment then."""
    hide(tmp_path_factory.mktemp("site"), monkeypatch, "tensorflow")


def hide(folder: Path, monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    lines = [f"sys.modules[{package!r}] = None" for package in packages]
    (folder / "sitecustomize.py").write_text("\n".join(["import sys", *lines]))
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])


def board_of(agent: psutil.Process) -> psutil.Process:
    (found,) = [p for p in agent.children() if "sparkdl.node.tensorboard" in p.cmdline()]
    return found


@has_tensorboard
@pytest.mark.timeout(120)
def test_board_answers_shows_its_folder_and_ends_with_an_agent_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # an agent that is killed leaves its files
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("TENSORBOARD_PORT", str(port))
    with launch(
        hang, nodes=1, feeding=Feeding(fed=False), observe=Observe(tensorboard=str(tmp_path))
    ) as cluster:
        agent = processes()["worker:0"].agent
        board = board_of(agent)
        them = [board, *board.children(recursive=True)]
        assert cluster.board is not None
        assert (cluster.board.port, cluster.board.pid) == (port, board.pid)
        url = cluster.tensorboard_url()
        assert url == f"http://127.0.0.1:{port}"
        with urllib.request.urlopen(f"{url}/data/environment", timeout=60) as answer:
            assert str(tmp_path) in answer.read().decode()
        agent.kill()
        assert all_gone(them)
        cluster.abort()
        assert cluster.tensorboard_url() is None


@has_tensorboard
@pytest.mark.timeout(120)
def test_board_without_port_ends_the_launch_in_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("TENSORBOARD_PORT", str(taken.getsockname()[1]))
        with pytest.raises(LaunchError, match=r"does not answer on 127\.0\.0\.1") as caught:
            launch(hang, nodes=1, feeding=Feeding(fed=False), observe=Observe(tensorboard=True))
    assert "could not bind to" in str(caught.value)
    assert "TENSORBOARD_PORT" in str(caught.value)
    assert not processes()


def test_missing_package_ends_the_launch_of_a_local_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(tmp_path, monkeypatch, "tensorboard")
    with pytest.raises(FrameworkMissingError, match="pip install tensorboard"):
        launch(hang, nodes=1, feeding=Feeding(fed=False), observe=Observe(tensorboard=True))
    assert not processes()
