"""Starts the programs of `programs/` as processes of their own, with a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_PROGRAMS = Path(__file__).parent / "programs"
_TIMEOUT_S = 200.0


def run_pair(
    programs: Sequence[str], folder: Path, **environment: str
) -> dict[str, list[dict[str, Any]]]:
    """Run programs on two workers of one cluster; return their results by program and rank."""
    with _reserved_ports(2) as ports:
        _run(
            [
                ["worker.py", json.dumps(programs), json.dumps(ports), str(rank), str(folder)]
                for rank in range(2)
            ],
            folder,
            environment,
        )
    found = [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(2)]
    return {program: [of_rank[program] for of_rank in found] for program in programs}


def run_alone(program: str, folder: Path) -> dict[str, Any]:
    """Run `program` in one process; return its result."""
    result = folder / "result.json"
    _run([[f"{program}.py", str(result)]], folder, {})
    found: dict[str, Any] = json.loads(result.read_text())
    return found


@contextlib.contextmanager
def _reserved_ports(count: int) -> Iterator[list[int]]:
    """Yield free ports that the kernel gives nobody else meanwhile.

    A socket that is bound with SO_REUSEADDR and does not listen keeps a port from being handed
    out, and lets another such socket, as gRPC's are, listen on it.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for reserved in sockets:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("127.0.0.1", 0))
        yield [reserved.getsockname()[1] for reserved in sockets]


def _run(commands: Sequence[list[str]], folder: Path, environment: dict[str, str]) -> None:
    """Run all commands at once until all have ended; fail with their output if one fails."""
    env = {
        **{name: value for name, value in os.environ.items() if name != "TF_CONFIG"},
        "PYTHONPATH": str(_ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "-1",
        **environment,
    }
    logs = [folder / f"output-{number}.txt" for number in range(len(commands))]
    processes: list[subprocess.Popen[bytes]] = []
    deadline_s = time.monotonic() + _TIMEOUT_S
    try:
        for command, log in zip(commands, logs, strict=True):
            with log.open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(_PROGRAMS / command[0]), *command[1:]],
                        env=env,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        codes = [process.wait(max(0.1, deadline_s - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        codes = []
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if codes != [0] * len(commands):
        tails = "\n".join(f"--- {log.name}\n{log.read_text()[-4000:]}" for log in logs)
        raise AssertionError(f"{commands} ended with {codes or 'a timeout'}\n{tails}")
