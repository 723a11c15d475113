"""An agent's fork server: Python's own, which has imported the framework for its children.

Runs in: agent, child

https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from sparkdl.core.settings import PRELOADED

CAN_FORK = sys.platform == "linux"


def prepare_fork(
    framework: str, modules: Sequence[str], environment: Mapping[str, str], fds: Sequence[int]
) -> BaseProcess:
    """Return a process that begins as a fork of the server, which is started if there is none.

    Args:
        environment: of the server and its forks, added to the agent's own.
        fds: of a child: its channel, its stacks, its log, into which a new server prints, too.
    """
    asked = json.dumps([os.getpid(), framework, list(modules)])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sparkdl.node.preload"])
    # On the agent's main thread: the kernel kills the server with the thread that has started it.
    with _inherited({**environment, PRELOADED: asked}, fds[-1]):
        forkserver.ensure_running()
    # Connections are what multiprocessing can send; these are copies, closed with the process.
    return context.Process(target=_run, args=[Connection(os.dup(fd)) for fd in fds])


@contextmanager
def _inherited(environment: Mapping[str, str], output: int) -> Iterator[None]:
    before, copies = dict(os.environ), [os.dup(number) for number in (1, 2)]
    # SIGUSR1 is to wait until a child has its handler; forks inherit the mask.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        os.environ.update(environment)
        for number in (1, 2):
            os.dup2(output, number)
        yield
    finally:
        for number, copy in zip((1, 2), copies, strict=True):
            os.dup2(copy, number)
            os.close(copy)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.environ.clear()
        os.environ.update(before)


def _run(*connections: Connection) -> None:
    from sparkdl.node.preload import run  # not in the agent, which imports no framework

    run(*connections)


def start_fork(fork: BaseProcess) -> int:
    fork.start()
    # Or the agent's own end would wait for it.
    getattr(process, "_children").discard(fork)  # noqa: B009 (mypy does not know it)
    return fork.pid or 0


def exit_status(fork: BaseProcess) -> int:
    """Return the status of a fork that has ended, as `subprocess.Popen.returncode`."""
    try:
        return int(forkserver.read_signed(fork.sentinel))
    except (OSError, EOFError):  # the server is gone, and the kernel has killed its forks
        return -signal.SIGKILL
