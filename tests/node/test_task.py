"""Problems cross Spark as text, whatever is in them; executors are checked first."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from sparkdl.core.errors import LaunchError
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.node.task import check_executor, parse_problem


def spec(framework: str = "plain") -> ClusterSpec:
    return ClusterSpec("c", plan_nodes(1), framework=framework)


def test_a_driver_that_cannot_be_reached_is_a_config_error_naming_the_settings() -> None:
    with closing(socket.socket()) as bound:  # but not listening
        bound.bind(("127.0.0.1", 0))
        url = f"ws://127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(LaunchError) as raised:
            check_executor(spec(), url)
    problem = parse_problem(str(raised.value))
    assert problem is not None
    assert problem.kind == "ConfigError"
    assert problem.text.startswith(
        f"executor {socket.gethostname()} cannot reach the driver at {url}: "
    )
    assert "SPARKDL_DRIVER_HOST" in problem.text
    assert "SPARKDL_DRIVER_PORT" in problem.text


@pytest.mark.parametrize("url", ["ws://[::1]:7", "ws://127.0.0.1:7", "ws://driver:7"])
def test_driver_is_sought_at_the_host_of_its_url(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def create_connection(address: tuple[str, int], timeout: float) -> socket.socket:
        asked.append(address)
        return socket.socket()

    monkeypatch.setattr("sparkdl.node.task.socket.create_connection", create_connection)
    check_executor(spec(), url)
    assert asked == [(url.removeprefix("ws://").removesuffix(":7").strip("[]"), 7)]


def test_missing_framework_is_a_framework_missing_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkdl.node.task.importlib.util.find_spec", lambda name: None)
    with pytest.raises(LaunchError) as raised:
        check_executor(spec("torch"), "ws://127.0.0.1:1")
    problem = parse_problem(str(raised.value))
    assert problem is not None
    assert problem.kind == "FrameworkMissingError"
    assert "framework='torch' is not installed on executor" in problem.text
    assert "finds no module torch" in problem.text
