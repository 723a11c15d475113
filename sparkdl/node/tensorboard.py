"""TensorBoard beside a node: started, asked whether it answers, ended with its agent.

Runs in: agent

`python -m sparkdl.node.tensorboard --logdir …` runs `python -m tensorboard.main` until its standard
input ends. The agent holds the other end, so TensorBoard ends with the agent, even after a crash.
"""

from __future__ import annotations

import asyncio
import os
import re
import runpy
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec

from sparkdl.control.messages import BoardStarted
from sparkdl.core.errors import LaunchError

START_S = 120.0
"""How long it may take to answer: it imports TensorFlow where that is installed."""
_TAIL_LINES = 20
_STOP_S = 3.0
_ANNOUNCED = re.compile(rb"TensorBoard \S+ at https?://\S+:(\d+)/")


class TensorBoard:
    """TensorBoard beside the node of rank 0. `follow` the node's rank, and `close` it in any case.

    Args:
        log_dir: the logs it shows: a folder or a URL, as TensorBoard takes them.
        host: the address that it listens on.
        port: 0 for any that is free.
        report: called once it answers, or with why it does not.
    """

    def __init__(
        self, log_dir: str, host: str, port: int, report: Callable[[BoardStarted], None]
    ) -> None:
        self._log_dir = log_dir
        self._host = host
        self._port = port
        self._report = report
        self._lines: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self._running: asyncio.Task[None] | None = None
        self._ending: list[asyncio.Task[None]] = []

    def follow(self, rank: int) -> None:
        if rank == 0 and self._running is None:
            self._running = asyncio.create_task(self._run())
        elif rank != 0 and self._running is not None:
            self._running.cancel()
            # Kept for `close`: the process must not outlive the agent.
            self._ending.append(self._running)
            self._running = None

    async def close(self) -> None:
        self.follow(-1)
        if self._ending:
            await asyncio.wait(self._ending)

    async def _run(self) -> None:
        if find_spec("tensorboard") is None:
            problem = (
                f"tensorboard=True needs the package tensorboard, and {sys.executable} on "
                f"{self._host} has none. Install it in the Python environment of the executors "
                "(pip install tensorboard), or leave tensorboard out"
            )
            self._report(BoardStarted(problem=problem, is_missing=True))
            return
        process: asyncio.subprocess.Process | None = None
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "sparkdl.node.tensorboard", "--logdir", self._log_dir),
                *("--host", self._host, "--port", str(self._port)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                # TensorBoard imports TensorFlow, which must not take memory of the node's GPUs.
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,
            )
            port = await asyncio.wait_for(self._come_up(process), START_S)
            self._report(BoardStarted(port, process.pid))
            assert process.stdout is not None
            # Kept flowing: it would stop at a full pipe.
            while data := await process.stdout.read(1 << 16):
                self._lines.append(data)
        except (asyncio.TimeoutError, OSError, LaunchError) as error:
            problem = self._problem_text(str(error) or f"no answer within {START_S:g} s")
            self._report(BoardStarted(problem=problem))
        finally:
            if process is not None:
                await _end(process)

    async def _come_up(self, process: asyncio.subprocess.Process) -> int:
        assert process.stdout is not None
        async for line in process.stdout:
            self._lines.append(line)
            if found := _ANNOUNCED.search(line):
                return int(found[1])
        raise LaunchError(f"it ended with status {await process.wait()}")

    def _problem_text(self, what: str) -> str:
        output = b"".join(self._lines).decode(errors="replace").strip()
        tail = "".join(f"\n  | {line}" for line in output.splitlines()) or " (nothing)"
        return (
            f"TensorBoard for {self._log_dir!r} does not answer on {self._host}: {what}. Set "
            "TENSORBOARD_PORT to a free port on the executors, or leave tensorboard out. Its last "
            f"lines:{tail}"
        )


async def _end(process: asyncio.subprocess.Process) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, asyncio.TimeoutError):
            os.killpg(process.pid, number)
            await asyncio.wait_for(process.wait(), _STOP_S)


def main() -> None:
    threading.Thread(target=_end_with_owner, name="sparkdl-owner", daemon=True).start()
    sys.argv[0] = "tensorboard"
    runpy.run_module("tensorboard.main", run_name="__main__", alter_sys=True)


def _end_with_owner() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGTERM)  # its own session: it and its children
    threading.Event().wait(_STOP_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
