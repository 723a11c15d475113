"""What a cluster's children have done for a while: busy, hung, stopped, killed and ended ones."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sparkdl.core.errors import ConfigError, NodeFailedError
from sparkdl.node.context import NodeContext
from sparkdl.node.profiler import PERIOD_S
from tests.doubles.nodes import Lines, launch, processes

LONG_S = 3600.0
"""A profile that ends by what happens, not by its time."""


def spin(cpu_s: float) -> None:
    """Take CPU time."""
    end_s = time.thread_time() + cpu_s
    while time.thread_time() < end_s:
        sum(range(100))


def is_profiled() -> bool:
    """Whether a profile of this process is being taken."""
    return any(thread.name == "sparkdl-profile" for thread in threading.enumerate())


def spin_until_profiled(args: Any, ctx: NodeContext) -> int:
    """Return once a profile has seen this for a while."""
    while not is_profiled():
        spin(0.01)
    spin(0.3)
    return ctx.rank


def test_profile_ends_with_map_fun_and_tells_what_it_did(tmp_path: Path) -> None:
    with launch(spin_until_profiled) as cluster:
        profile = cluster.profile(LONG_S)
        assert cluster.results() == [0, 1]
    assert not profile.missing
    assert not profile.folders
    for text in profile.collapsed.values():
        seen = [
            line for line in text.splitlines() if ";spin_until_profiled (driver/test_pr" in line
        ]
        assert seen
        assert all(
            line.startswith("MainThread;_run_module_as_main (<frozen runpy>") for line in seen
        )
        assert all(int(line.rpartition(" ")[2]) >= 1 for line in seen)
    assert "sparkdl-link;" in profile.collapsed["worker:1"], "all threads"
    assert "sparkdl-profile" not in profile.collapsed["worker:1"], "but its own"
    profile.save(tmp_path / "all.txt")
    lines = (tmp_path / "all.txt").read_text().splitlines()
    assert {line.split(";")[0] for line in lines} == {"worker:0", "worker:1"}
    profile.save(tmp_path / "all.json")
    check_speedscope(json.loads((tmp_path / "all.json").read_text()), profile.collapsed)


def check_speedscope(file: dict[str, Any], collapsed: dict[str, str]) -> None:
    """Compare a file with https://www.speedscope.app/file-format-schema.json and the stacks."""
    assert file["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    frames = [frame["name"] for frame in file["shared"]["frames"]]
    every, *nodes = file["profiles"]
    assert (every["name"], [node["name"] for node in nodes]) == ("all 2 nodes", [*collapsed])
    assert every["endValue"] == pytest.approx(sum(node["endValue"] for node in nodes))
    for profile in file["profiles"]:
        assert (profile["type"], profile["unit"], profile["startValue"]) == (
            "sampled",
            "seconds",
            0,
        )
        assert profile["endValue"] == pytest.approx(sum(profile["weights"]))
    for node in nodes:
        stacks = [";".join(frames[number] for number in sample) for sample in node["samples"]]
        counts = [round(weight / PERIOD_S) for weight in node["weights"]]
        lines = [f"{stack} {count}" for stack, count in zip(stacks, counts, strict=True)]
        assert "\n".join(lines) == collapsed[node["name"]]


def hold_on(args: Any, ctx: NodeContext) -> None:
    """On rank 0 let nobody else have the interpreter; on others wait."""
    print("in map_fun", flush=True)
    if ctx.rank == 0:
        ctypes.PyDLL(None).sleep(600)
    threading.Event().wait()


def test_nodes_that_hang_or_are_stopped_hold_up_no_other() -> None:
    lines = Lines()
    with launch(hold_on, nodes=3, on_log=lines) as cluster:
        lines.wait_for("in map_fun", 3)
        stopped = processes()["worker:1"].child
        stopped.send_signal(signal.SIGSTOP)
        profile = cluster.profile(0.2)
        assert list(profile.collapsed) == ["worker:2"]
        assert "C code holds its lock" in profile.missing["worker:0"]
        assert f"process {stopped.pid} is stopped (SIGSTOP)" in profile.missing["worker:1"]
        assert "worker:2; nothing of worker:0: no profile within" in repr(profile)
        stopped.send_signal(signal.SIGCONT)
        cluster.abort()
    assert set(cluster.profile(LONG_S).missing.values()) == {"it has ended, as the cluster has"}


def die_if_profiled(args: Any, ctx: NodeContext) -> None:
    """Kill this process on rank 1 when a profile of it begins."""
    while ctx.rank == 0 or not is_profiled():
        spin(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def test_node_that_dies_meanwhile_is_named_at_once() -> None:
    with pytest.raises(NodeFailedError), launch(die_if_profiled) as cluster:
        profile = cluster.profile(LONG_S)
        assert profile.missing["worker:1"] == "the child has ended meanwhile"
        cluster.wait()


def test_lengths_that_make_no_sense_are_refused() -> None:
    with launch(hold_still) as cluster:
        for seconds in (0, -1, float("nan"), LONG_S + 1):
            with pytest.raises(ConfigError, match=r"seconds=.*: give a number above 0"):
                cluster.profile(seconds)
        cluster.abort()


def hold_still(args: Any, ctx: NodeContext) -> None:
    """Wait."""
    threading.Event().wait()
