"""What a cluster's children have done for a while: busy, hung, stopped, killed and ended ones."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkdl import Cluster
from sparkdl.core.errors import ConfigError, NodeFailedError
from sparkdl.driver.options import Observe
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
    with launch(hold_on, nodes=3, observe=Observe(on_log=lines)) as cluster:
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


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        *(({"seconds": s}, "give a number above 0") for s in (0, -1, float("nan"), LONG_S + 1)),
        ({"tool": "cprofile"}, "choose one of tensorflow, torch, jax"),
        ({"tool": "torch"}, "give a folder that all hosts see"),
        ({"tool": "torch", "folder": "s3://bucket/x"}, "profilers write local files"),
        ({"tool": "torch", "folder": "{tmp}", "seconds": 0.1}, "is imported by no node .*'plain'"),
    ],
)
def test_what_cannot_be_profiled_is_refused(
    still: Cluster, asked: dict[str, Any], why: str, tmp_path: Path
) -> None:
    if asked.get("folder") == "{tmp}":
        asked = {**asked, "folder": str(tmp_path)}
    with pytest.raises(ConfigError, match=why):
        still.profile(**asked)


def test_files_of_stacks_are_written_where_wanted(still: Cluster, tmp_path: Path) -> None:
    still.profile(0.1, folder=str(tmp_path / "new"))
    text, scope = sorted((tmp_path / "new").iterdir())
    assert (text.name[-14:], scope.name[-16:]) == (".collapsed.txt", ".speedscope.json")


@pytest.fixture(scope="module")
def still() -> Iterator[Cluster]:
    """A cluster whose nodes wait."""
    with launch(hold_still) as cluster:
        yield cluster
        cluster.abort()


def hold_still(args: Any, ctx: NodeContext) -> None:
    """Wait."""
    threading.Event().wait()


def work_until_profiled(args: Any, ctx: NodeContext) -> None:
    """Multiply matrices of a framework until a profile has been taken."""
    multiply = MULTIPLY[args]()
    multiply()
    print("in map_fun", flush=True)
    while not is_profiled():
        multiply()
    while is_profiled():
        multiply()


def _tensorflow() -> Any:
    import tensorflow as tf

    ones = tf.ones((50, 50))
    return lambda: tf.matmul(ones, ones)


def _torch() -> Any:
    import torch

    ones = torch.ones((50, 50))
    return lambda: ones @ ones


def _jax() -> Any:
    import jax.numpy as jnp

    ones = jnp.ones((50, 50))
    return lambda: (ones @ ones).block_until_ready()


MULTIPLY = {"tensorflow": _tensorflow, "torch": _torch, "jax": _jax}


@pytest.mark.deep
@pytest.mark.parametrize(
    ("tool", "files"),
    [
        pytest.param("tensorflow", "plugins/profile/*/*.xplane.pb", marks=pytest.mark.tensorflow),
        pytest.param("jax", "plugins/profile/*/*.xplane.pb", marks=pytest.mark.jax),
        pytest.param("torch", "*.pt.trace.json", marks=pytest.mark.torch),
    ],
)
def test_frameworks_profilers_write_a_folder_for_each_node(
    tool: str, files: str, tmp_path: Path
) -> None:
    lines = Lines()
    with launch(
        work_until_profiled, tool, framework=tool, observe=Observe(on_log=lines)
    ) as cluster:
        lines.wait_for("in map_fun", 2)
        profile = cluster.profile(1.0, str(tmp_path), tool)
        cluster.wait()
    assert not profile.missing
    for node in ("worker:0", "worker:1"):
        assert profile.folders[node] == str(tmp_path / node.replace(":", "-"))
        (written,) = Path(profile.folders[node]).glob(files)
        assert re.search(rb"matmul|dot|MatMul|aten::mm", written.read_bytes())
