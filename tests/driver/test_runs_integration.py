"""Clusters that run, as another terminal of their user sees them."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from sparkdl.cli import main
from sparkdl.driver import runs
from sparkdl.driver.events import AnyEvent, Changed, FeedColumns, Launched, Place, Sampled
from sparkdl.driver.history import folded
from sparkdl.driver.options import Observe
from sparkdl.driver.run_socket import folder_of_user
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import SOON_S, Lines, launch


@dataclass
class Terminal:
    """Runs commands, and has what they print."""

    capture: pytest.CaptureFixture[str]

    def run(self, *words: str) -> tuple[int, str]:
        self.capture.readouterr()
        status = main(list(words))
        out, err = self.capture.readouterr()
        return status, out + err


@pytest.fixture
def terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Terminal]:
    """One beside which no other test launches clusters."""
    with tempfile.TemporaryDirectory() as folder:  # that of the test has too long a name
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Terminal(capsys)


def hold_still(args: Any, ctx: NodeContext) -> None:
    """Report a step and wait."""
    ctx.report(step=1234)
    print("in map_fun", flush=True)
    threading.Event().wait()


def test_running_clusters_are_listed_looked_at_and_gone(terminal: Terminal) -> None:
    status, said = terminal.run("runs")
    assert (status, said[:21]) == (0, "no cluster is running")
    assert terminal.run("stacks") == (1, f"sparkdl stacks: {said}")
    lines = Lines()
    with launch(hold_still, observe=Observe(on_log=lines)) as cluster:
        lines.wait_for("in map_fun", 2)
        cluster.reported(timeout_s=SOON_S)
        first = cluster.spec.cluster_id
        _, said = terminal.run("runs")
        assert " ".join(said.splitlines()[0].split()) == "ID PROGRAM (PID) NODES ELAPSED STATE"
        assert said.splitlines()[1].startswith(f"{first}  ")
        assert said.rstrip().endswith("Running")
        assert "2 plain" in said
        status, said = terminal.run("stacks")
        assert (status, said.count("in hold_still")) == (0, 2)
        assert said.startswith("worker:0\n")
        status, said = terminal.run("top", first[:4], "--once")
        assert (status, said.splitlines()[0][:25]) == (0, f"Cluster {first}: Running")
        assert "worker:0  0     127.0.0.1" in said
        assert "in map_fun  1,234" in said
        with launch(hold_still) as other:
            status, said = terminal.run("top")
            assert status == 1
            assert "sparkdl top: several clusters run: name one of " in said
            assert other.spec.cluster_id in said
            other.abort()
        assert terminal.run("stacks", "x")[1] == (
            f"sparkdl stacks: there is no cluster x; choose one of {first}\n"
        )
        cluster.abort()
    assert not folder_of_user().exists()


def test_sockets_of_dead_drivers_are_removed_and_stopped_ones_named(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_of_user().mkdir(mode=0o700)
    dead, stopped = folder_of_user() / "dead.sock", folder_of_user() / "stopped.sock"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(dead))
        sock.listen()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(stopped))
        sock.listen()  # and nobody accepts
        monkeypatch.setattr(runs, "_ANSWER_S", 0.1)
        status, said = terminal.run("runs")
        assert (status, "dead" in said) == (0, False)
        assert said.splitlines()[1].split() == ["stopped", "does", "not", "answer"]
        assert not dead.exists()
        assert stopped.exists()


def test_folder_that_others_may_enter_is_not_used(terminal: Terminal) -> None:
    folder_of_user().mkdir()
    folder_of_user().chmod(0o777)
    with launch(hold_still) as cluster:
        assert list(folder_of_user().iterdir()) == []
        assert terminal.run("top")[0] == 1
        cluster.abort()


def test_table_tells_who_waits_for_rows_and_what_nodes_take() -> None:
    def sample(time_s: float, used: list[int]) -> Sampled:
        feeds = {"input": FeedColumns([900, 900], used, [9, 9], [0, 0])}
        load = {"cores": [1.25, 0.0], "memory_nbytes": [3.0 * 2**30, 2.0**29]}
        states, pids, steps = ["in map_fun"] * 2, [10, 0], [-1, 70]
        waits: dict[str, list[float | None]] = {
            "rows": [0.65, 0.0],
            "others": [0.2, None],
            "lag": [0.0, 0.4],
        }
        return Sampled("c", time_s, states, pids, steps, {}, feeds, load, waits)

    launched = Launched("c", 0.0, "torch", ("worker:0", "worker:1"), True, "train.py", 7)
    running = Changed("c", 1.0, "running", 0, (Place(0, 0, "h"), Place(1, 1, "")), status="Running")
    before = [launched, running, sample(90_059.0, [100, 500])]
    after = [launched, running, sample(90_061.0, [900, 500])]
    assert msgspec.json.decode(msgspec.json.encode(after), type=list[AnyEvent]) == after
    told = runs.nodes_table(folded([*before, *after]))
    assert told == [
        "Cluster c: Running (train.py (7), 1d 01:01:01)",
        "",
        "node      rank  host  pid  state       step  feed 'input'       rows/s  cores  memory   "
        "waits for",
        "worker:0  0     h     10   in map_fun        900 rows, 9 steps  400     1.2    3.0 GiB  "
        "rows 65%, nodes 20%",
        "worker:1  1                in map_fun  70    500 rows, 9 steps  0       0.0    0.5 GiB  "
        "awaited by the others",
    ]
