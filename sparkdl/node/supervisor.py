"""A child process: started, watched, ended, and how it ended.

Runs in: agent
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sparkdl.node.logs import ChildLog
from sparkdl.node.resources import oom_kills
from sparkdl.node.stacks import SIGNAL, StackFile

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChildSpec:
    """What a child is started with.

    Attributes:
        payload: the file that holds the pickled `(map_fun, args)`.
        port_socket: the bound socket of the framework's port; the child gets a copy.
        environment: added to the agent's own.
    """

    framework: str
    payload: Path
    log: ChildLog
    port_socket: socket.socket
    environment: Mapping[str, str]


class Child:
    """One running child. The agent's side of its pipe is `sock`; the owner calls `close`."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        sock: socket.socket,
        order: ChildSpec,
        stacks: StackFile,
    ) -> None:
        self.sock = sock
        self.stacks = stacks
        self.log = order.log
        self._process = process
        self._port_socket = order.port_socket
        self._oom_kills_before = oom_kills()
        self._has_swept = False

    @classmethod
    def spawn(cls, order: ChildSpec) -> Child:
        """Start the child in a process group of its own, so that all it starts ends with it."""
        ours, theirs = socket.socketpair()
        log_fd = order.log.open_for_child()
        stacks = StackFile()
        fds = (theirs.fileno(), order.port_socket.fileno(), stacks.fd)
        # The child inherits that SIGUSR1 waits: before it knows the signal, it would end by it.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})
        try:
            process = subprocess.Popen(
                _command(order, *fds),
                stdin=subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                env={**os.environ, **order.environment},
                pass_fds=fds,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            stacks.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            theirs.close()
            os.close(log_fd)
        return cls(process, ours, order, stacks)

    @property
    def pid(self) -> int:
        """The child's process id, which is its group's as well."""
        return self._process.pid

    @property
    def port(self) -> int:
        """The port that is held for the framework."""
        return int(self._port_socket.getsockname()[1])

    def let_go_of_port(self) -> None:
        """Close the agent's copy of the port's socket; the child decides when to close its own."""
        self._port_socket.close()

    def watch(self, loop: asyncio.AbstractEventLoop, on_exit: Callable[[int], None]) -> None:
        """Call `on_exit` on the loop with `Popen.returncode` as soon as the child has ended."""
        wait = self._process.wait
        watch_pid(loop, self.pid, lambda: on_exit(wait()), wait)

    def signal_group(self, number: int) -> None:
        """Send a signal to the child and everything that it has started.

        Once the child has been waited for, the first signal still goes out, to what it left behind.
        No other does: the system may have given the group's number to somebody else.
        """
        if self._has_swept:
            return
        self._has_swept = self._process.returncode is not None
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            _log.debug("The process group %d has ended already", self.pid)

    def was_oom_killed(self, status: int) -> bool:
        """Whether the kernel killed a process of this cgroup for memory while the child ran."""
        return status == -signal.SIGKILL and oom_kills() > self._oom_kills_before

    def close(self, keeps_port: bool = False) -> socket.socket | None:
        """Release what is left of a child that has ended.

        Returns:
            The socket that holds the port, if it is to be kept and is still held.
        """
        self.sock.close()
        self.stacks.close()
        if keeps_port and self._port_socket.fileno() >= 0:
            return self._port_socket
        self._port_socket.close()
        return None


def watch_pid(
    loop: asyncio.AbstractEventLoop,
    pid: int,
    on_exit: Callable[[], None],
    wait: Callable[[], object] | None = None,
) -> None:
    """Call `on_exit` once on the loop when process `pid` ends: pidfd_open(2), or a thread.

    Args:
        wait: waits for a child of this process, for the thread: nothing else may reap it.
    """
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        loop.call_soon(on_exit)
        return
    except (AttributeError, OSError):
        waits = wait or (lambda: _wait_for_stranger(pid))
        threading.Thread(
            target=_wait_in_thread, args=(loop, waits, on_exit), name="sparkdl-wait", daemon=True
        ).start()
        return

    def ready() -> None:
        loop.remove_reader(fd)
        os.close(fd)
        on_exit()

    loop.add_reader(fd, ready)


def _wait_in_thread(
    loop: asyncio.AbstractEventLoop, wait: Callable[[], object], on_exit: Callable[[], None]
) -> None:
    wait()
    with suppress(RuntimeError):  # the loop is closed: nobody wants to know any more
        loop.call_soon_threadsafe(on_exit)


def _wait_for_stranger(pid: int) -> None:
    import psutil

    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait()


def _command(order: ChildSpec, channel_fd: int, port_fd: int, stacks_fd: int) -> Sequence[str]:
    module = "sparkdl.node.child"
    numbers = [str(n) for n in (channel_fd, port_fd, stacks_fd, os.getpid())]
    return [sys.executable, "-m", module, *numbers, order.framework, str(order.payload)]
