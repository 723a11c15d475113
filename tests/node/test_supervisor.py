"""Real, tiny children under the supervisor: how they end, and that nothing of them stays."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from sparkdl.node import resources, supervisor
from sparkdl.node.supervisor import Child, ChildSpec, wait_for_stranger, watch_end
from tests.doubles.nodes import SOON_S, all_gone

Spawn = Callable[[str], Child]

EXITS_7 = "raise SystemExit(7)"
IGNORES_TERM = """
import signal
signal.signal(signal.SIGTERM, lambda *_: print("terminated", flush=True))
print("up", flush=True)
while True:
    signal.pause()
"""
LEAVES_A_PROCESS = """
import subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(left.pid, flush=True)
"""
PRINTS = """
import os, subprocess, sys
for i in range(3):
    print(f"out {i}", flush=True)
    print(f"err {i}", file=sys.stderr, flush=True)
    os.write(1, f"raw {i}\\n".encode())
    subprocess.run(["/bin/sh", "-c", f"echo shell {i}"], check=True)
"""


@pytest.fixture
def spawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spawn]:
    """A function that starts a program where the framework process goes."""
    real_command = supervisor._command
    with ExitStack() as stack:

        def start(program: str) -> Child:
            def command(spec: ChildSpec, *fds: int) -> list[str]:
                return [sys.executable, "-c", program, *real_command(spec, *fds)[3:]]

            monkeypatch.setattr(supervisor, "_command", command)
            child = Child.spawn(ChildSpec("plain", {"MARK": "1"}))
            stack.callback(child.close)
            stack.callback(child.signal_group, signal.SIGKILL)
            return child

        yield start


def end_of(child: Child, then: Callable[[], None] = lambda: None) -> int:
    """Return the child's status once it has ended; calls `then` when it is being watched."""

    async def wait() -> int:
        loop = asyncio.get_running_loop()
        status: asyncio.Future[int] = loop.create_future()
        child.watch(loop, status.set_result)
        then()
        return await asyncio.wait_for(status, SOON_S)

    return asyncio.run(wait())


def line(child: Child, number: int = 1) -> str:
    async def look() -> str:
        while len(lines := child.log.tail(number)) < number:
            await asyncio.sleep(0.01)
        return lines[-1]

    return asyncio.run(asyncio.wait_for(look(), SOON_S))


def test_group_kill_takes_the_processes_that_an_ended_child_left(spawn: Spawn) -> None:
    child = spawn(LEAVES_A_PROCESS)
    grandchild = psutil.Process(int(line(child)))
    assert end_of(child) == 0
    assert grandchild.is_running()
    child.signal_group(signal.SIGKILL)
    assert all_gone([grandchild])


def test_ended_childs_number_gets_no_signal(spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    """By then, the system may have given the number to another process."""
    child = spawn(EXITS_7)
    assert end_of(child) == 7
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "killpg", lambda *signal_: signals.append(signal_))
    child.signal_group(signal.SIGKILL)  # for what it left behind
    child.signal_group(signal.SIGKILL)
    assert signals == [(child.pid, signal.SIGKILL)]


def test_everything_printed_is_in_the_log_in_order(spawn: Spawn) -> None:
    child = spawn(PRINTS)
    assert end_of(child) == 0
    kinds = ("out", "err", "raw", "shell")
    assert child.log.tail(100) == tuple(f"{kind} {i}" for i in range(3) for kind in kinds)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("memory.events", "low 0\noom 2\noom_kill {}\n"),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill {}"),
    ],
    ids=["cgroup v2", "cgroup v1"],
)
def test_kill_is_for_memory_if_the_cgroup_counts_one_more(
    spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    counter = tmp_path / name
    counter.write_text(text.format(3))
    monkeypatch.setattr(resources, "memory_cgroups", lambda: [tmp_path])
    child = spawn(IGNORES_TERM)
    status = end_of(child, lambda: child.signal_group(signal.SIGKILL))
    assert (status, child.failure(status).kind) == (-signal.SIGKILL, "signal")
    counter.write_text(text.format(4))
    assert child.failure(status).kind == "oom"
    assert child.failure(7).kind == "exit"


@pytest.mark.parametrize("status", [-signal.SIGABRT, -signal.SIGSEGV])
def test_child_that_jax_ends_for_a_lost_peer_is_a_consequence(status: int) -> None:
    with closing(Child(ChildSpec("jax", {}, node="worker:1"))) as child:
        assert not child.failure(status).is_consequence
        child.log.add(
            "F1 client.h:80] Terminating process because the JAX "
            "distributed service detected fatal errors"
        )
        failure = child.failure(status)
    assert (failure.node, failure.kind, failure.signal_number) == ("worker:1", "signal", -status)
    assert failure.is_consequence is (status == -signal.SIGABRT)


def test_stranger_is_watched_to_its_end_even_if_that_was_before() -> None:
    async def watch(pid: int) -> None:
        for _ in range(2):
            seen = asyncio.Event()
            watch_end(asyncio.get_running_loop(), partial(wait_for_stranger, pid), seen.set)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            await asyncio.wait_for(seen.wait(), SOON_S)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)

    with subprocess.Popen([sys.executable, "-c", IGNORES_TERM]) as process:
        asyncio.run(watch(process.pid))
