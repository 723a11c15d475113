"""The process that imports a framework once for an executor, and forks the nodes' children.

Runs in: zygote

`python -u -m sparkdl.node.zygote PLAN`, started by the first agent of an executor that needs it,
and found as `node/forking.py` says. It imports the framework and `preload`, runs nothing, and
forks: a child for each round of each node, and the agents of the next launch.

A child ends with its connection, which is its agent's. A connection that asks for nothing says that
its agent may ask soon. Without connections and processes the zygote waits for `keep_s` longer; it
ends with the executor. While it imports it ends with the first of its connections. Where a fork
would not be safe it says so, and children start cold.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import os
import select
import selectors
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

import msgspec

from sparkdl.control.descriptors import close_fd, peer_of, receive_with_fds
from sparkdl.core.errors import ProtocolError
from sparkdl.frameworks.framework import Framework
from sparkdl.node.child import import_all, import_more, live
from sparkdl.node.forking import (
    BACKLOG,
    MAX_FDS,
    MAX_NBYTES,
    Answer,
    Exited,
    Forked,
    Plan,
    Request,
    Unsafe,
    agents_name,
    zygote_command,
)
from sparkdl.node.heap import keep_freed_memory
from sparkdl.node.resources import lack_of_memory

_FIRST_S = 30.0
"""The time for this process's starter to connect, and then for its first request."""
_IDLE_S = 2.0
"""A zygote that was asked for nothing for so long imports what comes later, and looks at memory."""
_FORK_SAFE = "jemalloc_bg_thd"
"""Arrow's allocator: jemalloc stops its thread at a fork, and starts it again in the child."""
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
_Stamp = tuple[int, int, int]
_AGENTS_MODULES = (
    "sparkdl.node.agent",
    "sparkdl.control.client",
    "sparkdl.feed.transfer.endpoint",
)


@dataclass
class ImportedFiles:
    """The files of the modules of this process, as they were when they had been imported.

    Another link to a file changes its `st_ctime`, so this does not count later. While modules are
    imported it does: any change then may be newer than the imported code.
    """

    _stamps: dict[str, _Stamp | None] = field(default_factory=dict)

    def add(self, began_s: float) -> None:
        """Take the stamps of files that are new here.

        Args:
            began_s: Unix time before the first of their imports.
        """
        for module in list(sys.modules.values()):
            try:  # to ask the module would run one that is to be run when it is first used
                path = object.__getattribute__(module, "__dict__").get("__file__")
            except AttributeError:
                continue
            # Not every `__file__` is a path: that of `torch.ops` names no file.
            if isinstance(path, str) and os.path.isabs(path) and path not in self._stamps:
                self._stamps[path] = _stamp(path, began_s)

    def changed(self) -> str:
        """Return a file that has changed since it was imported; empty if none has."""
        for path, stamp in self._stamps.items():
            if stamp is None or _stamp(path) != stamp:
                return path
        return ""


def _stamp(path: str, began_s: float = float("inf")) -> _Stamp | None:
    """Return a stamp of a file, or of its archive, that differs for another file at its path.

    `None` if it is gone, or has changed since `began_s`.
    """
    while path:
        try:
            found = os.stat(path)
            is_older = found.st_ctime <= began_s  # unlike st_mtime, no installer sets it
            return (found.st_ino, found.st_mtime_ns, found.st_size) if is_older else None
        except NotADirectoryError:  # in a zip file
            path = os.path.dirname(path)
        except OSError:
            break
    return None


@dataclass(eq=False)
class _Connection:
    """A connection, and the process that was forked for it."""

    sock: socket.socket
    kind: str = ""
    pid: int = 0
    pidfd: int = -1


Job = Callable[[], int]


@dataclass
class _Zygote:
    """Forks. `serve` returns in each process that is forked, with what this one has to do."""

    plan: Plan
    listener: socket.socket
    framework: Framework | None
    environment: Mapping[str, str]
    keep_s: float = 0.0
    _selector: selectors.BaseSelector = field(default_factory=selectors.PollSelector)
    _open: set[_Connection] = field(default_factory=set)
    _has_more: bool = False
    _files: ImportedFiles = field(default_factory=ImportedFiles)
    _job: Job | None = None
    _is_over: bool = False

    def serve(self, first: socket.socket) -> Job | None:
        """Fork until no process needs the zygote any more, and return `None` then.

        Args:
            first: a connection.
        """
        self._listen(self.listener)
        self._take(first)
        owner = os.pidfd_open(self.plan.owner_pid)
        self._selector.register(owner, selectors.EVENT_READ, self._end)
        idle_since_s = time.monotonic()
        while True:
            events = self._selector.select(_IDLE_S if self._open else min(_IDLE_S, self.keep_s))
            for key, _mask in events:
                if key.fileobj in self._selector.get_map():  # not closed by an earlier one
                    key.data()
                # A forked process must leave at once: the other events belong to the zygote.
                if self._job is not None or self._is_over:
                    return self._job
            now_s = time.monotonic()
            if self._open:
                idle_since_s = now_s
            # A zygote that only waits for the next launch gives its memory back when the executor
            # needs it.
            elif now_s - idle_since_s >= self.keep_s or lack_of_memory():
                return None
            if not events and self.framework and not self._has_more:
                self._import_more(self.framework)

    def _end(self) -> None:
        self._is_over = True

    def _listen(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        accept = partial(self._accept, listener)
        self._selector.register(listener, selectors.EVENT_READ, accept)

    def _import_more(self, framework: Framework) -> None:
        """Import what children need later, and agents; then fork agents as well."""
        self._has_more = True
        began_s = time.time()
        with suppress(Exception):  # children import it as well, and report it
            import_more(framework)
        for module in _AGENTS_MODULES:
            import_module(module)
        self._files.add(began_s)
        # Forks share these objects' memory until one writes to it, and a collection would.
        gc.freeze()
        # The imports since the last check may have started threads as well.
        self.plan = msgspec.structs.replace(self.plan, problem=_what_is_unsafe())
        if self.keep_s and not self.plan.problem:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with suppress(OSError):
                listener.bind(agents_name(self.listener.getsockname().decode()))
                listener.listen(BACKLOG)
                self._listen(listener)

    def _accept(self, listener: socket.socket) -> None:
        if not self._open and self.framework and self._files.changed():
            _begin_again(self.plan, self.environment, problem="")  # the agent waits meanwhile
        with suppress(OSError):
            if sock := _accepted(listener):
                self._take(sock)

    def _take(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        connection = _Connection(sock)
        self._open.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, partial(self._hear, connection))

    def _hear(self, connection: _Connection) -> None:
        try:
            data, fds = receive_with_fds(connection.sock, MAX_NBYTES, MAX_FDS)
        except BlockingIOError:
            return
        except OSError:
            # A reset connection is treated like a closed one.
            data, fds = b"", []
        try:
            # A connection is one process and carries one request. A second message breaks the
            # protocol.
            if not data or connection.kind:
                self._hang_up(connection)
                return
            request = msgspec.json.decode(data, type=Request)
            connection.kind = request.kind
            if request.keep_s is not None:
                self.keep_s = request.keep_s
            if request.kind != "hold":
                self._fork(connection, request, fds)
        except (ValueError, ProtocolError):
            self._hang_up(connection)
        finally:
            # In a forked process the job still uses the descriptors.
            if self._job is None:
                for fd in fds:
                    close_fd(fd)

    def _fork(self, connection: _Connection, request: Request, fds: list[int]) -> None:
        # -1 stands for a descriptor that the kernel has dropped, see `receive_with_fds`.
        if -1 in fds or len(fds) != MAX_FDS:
            raise ProtocolError(f"{len(fds)} descriptors came with a request")
        if self.plan.problem or self.framework is None:
            _answer(connection, Unsafe(self.plan.problem))
            return
        try:
            connection.pid = _fork()
        except OSError as error:  # no memory, or too many processes: the zygote must not end
            _answer(connection, Unsafe(f"it cannot be forked: {error}"))
            return
        if connection.pid:
            # The number cannot belong to another process yet: only `_reap` waits for this child.
            connection.pidfd = os.pidfd_open(connection.pid)
            reap = partial(self._reap, connection)
            self._selector.register(connection.pidfd, selectors.EVENT_READ, reap)
            return
        os.setsid()
        # The fork itself sends its number, once it leads its group: the receiver may signal that
        # group.
        _answer(connection, Forked(os.getpid()))
        self._let_go()
        run = _run_agent if request.kind == "agent" else _run_child
        self._job = partial(run, self, request, fds)

    def _let_go(self) -> None:
        """Close the zygote's descriptors in a process that was forked."""
        for key in list(self._selector.get_map().values()):
            # Closed by number and then detached: a destructor would close the number a second time,
            # when it may belong to another file.
            os.close(key.fd)
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.detach()
        self._selector.close()

    def _reap(self, connection: _Connection) -> None:
        self._selector.unregister(connection.pidfd)
        os.close(connection.pidfd)
        _pid, status = os.waitpid(connection.pid, 0)
        connection.pid = 0
        # `_hang_up` has closed the connection and left its end to this function.
        if connection.sock.fileno() < 0:
            self._open.discard(connection)
            return
        _answer(connection, Exited(os.waitstatus_to_exitcode(status)))

    def _hang_up(self, connection: _Connection) -> None:
        self._selector.unregister(connection.sock)
        connection.sock.close()
        if not connection.pid:
            self._open.discard(connection)
        # An agent is left alone: it ends with its standard input, or with its executor.
        elif connection.kind == "child":
            for kill in (os.killpg, os.kill):  # it may not have a group yet
                with suppress(ProcessLookupError):
                    kill(connection.pid, signal.SIGKILL)


def _answer(connection: _Connection, answer: Answer) -> None:
    with suppress(OSError):  # the agent has gone
        connection.sock.send(msgspec.json.encode(answer))


def _run_agent(zygote: _Zygote, request: Request, fds: list[int]) -> NoReturn:
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    # The imports may have set variables. The name of a zygote depends on the environment, so the
    # agent needs the original one.
    os.environ.clear()
    os.environ.update(zygote.environment)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    _retitle("sparkdl.node.agent")
    from sparkdl.node.agent import main as run

    status = run()
    # `os._exit`, which follows, would skip them.
    atexit._run_exitfuncs()
    # Python would free what the zygote has imported, and so copy all of its pages first.
    os._exit(status)  # noqa: TID251


def _run_child(zygote: _Zygote, request: Request, fds: list[int]) -> int:
    channel, stacks, log = fds
    _copy(zygote.plan.output_fd, log)
    os.close(zygote.plan.output_fd)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.update({"PYTHONUNBUFFERED": "1", **request.environment})
    _retitle("sparkdl.node.child", request.node, request.agent_pid, zygote.plan.owner_pid)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # or all children would draw the same numbers
    assert zygote.framework is not None
    framework = zygote.framework
    live(channel, stacks, lambda: framework)
    return 0


def _copy(source: int, target: int) -> None:
    """Write what the imports have printed into the log of a child."""
    data = os.pread(source, MAX_NBYTES, 0)
    with suppress(OSError):
        os.write(target, data)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX and Python warn of threads, which there are none of
        return os.fork()


def _what_is_unsafe() -> str:
    """Return why this process must not fork, in words; empty if it may."""
    # A fork that does nothing comes first: OpenBLAS ends its threads at each fork, and starts them
    # again when they are needed.
    if not (pid := _fork()):
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    names = []
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
            # The main thread has the number of the process.
            if int(thread) != os.getpid() and (name := file.read().strip()) != _FORK_SAFE:
                names.append(name)
    if names:
        return f"the imports have started threads: {', '.join(sorted(names))}"
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if (target := os.readlink(f"/proc/self/fd/{fd}")).startswith(_DEVICES):
                return f"the imports have opened a GPU: {target}"
    return ""


def _begin_again(plan: Plan, environment: Mapping[str, str], **changes: Any) -> NoReturn:
    """Replace this process by a zygote that has imported nothing, and listens in its place."""
    plan = msgspec.structs.replace(plan, **changes)
    # exec closes every descriptor that Python has opened (PEP 446), unless it is inheritable.
    for fd in (plan.listener_fd, plan.output_fd, plan.first_fd):
        if fd >= 0:
            os.set_inheritable(fd, True)
    os.execve(sys.executable, zygote_command(plan), environment)


def _accepted(listener: socket.socket) -> socket.socket | None:
    """Accept a connection; return it if it is of the same user."""
    sock, _address = listener.accept()
    # Abstract names have no permissions: any user of the host can connect.
    if peer_of(sock).uid == os.geteuid():
        return sock
    sock.close()
    return None


def _first(listener: socket.socket) -> socket.socket | None:
    """Return the first connection; `None` if none comes."""
    while select.select([listener], [], [], _FIRST_S)[0]:
        if sock := _accepted(listener):
            return sock
    return None


@contextmanager
def _ending_with(sock: socket.socket) -> Iterator[None]:
    """Let the kernel end this process when the agent closes `sock`, because an import may hang."""
    # The request must be there already: its arrival would raise SIGIO, too.
    select.select([sock], [], [], _FIRST_S)
    flags = fcntl.fcntl(sock, fcntl.F_GETFL)
    # A thread or a handler of Python's would not run while C code holds the GIL. The kernel sends
    # SIGIO at whatever happens to `sock` (F_SETOWN in fcntl(2)): after the request, that is its
    # end.
    fcntl.fcntl(sock, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(sock, fcntl.F_SETFL, flags | os.O_ASYNC)
    try:
        # The agent may have gone before the kernel was asked to signal it.
        ended = select.poll()
        ended.register(sock, 0)  # POLLHUP alone
        if ended.poll(0):
            raise SystemExit
        yield
    finally:
        fcntl.fcntl(sock, fcntl.F_SETFL, flags)


def _retitle(*words: str | int) -> None:
    """Change the command that `ps` shows; it cannot grow longer than this process's."""
    with open("/proc/self/stat") as file:
        # The name, in parentheses, may contain spaces. Fields 48 and 49 of proc(5) are the
        # addresses of the first and the last byte of the command line.
        numbers = file.read().rpartition(")")[2].split()
    start, end = int(numbers[45]), int(numbers[46])
    command = [sys.executable, "-m", *map(str, words)]
    title = "\0".join(command).encode()[: end - start - 1]
    ctypes.memmove(start, title.ljust(end - start, b"\0"), end - start)


def main(argv: list[str]) -> int:
    """Be a zygote; in the processes that it forks, be these. Return the exit status."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # until a child has its handler
    plan = msgspec.json.decode(argv[0], type=Plan)
    listener = socket.socket(fileno=plan.listener_fd)
    first = socket.socket(fileno=plan.first_fd) if plan.first_fd >= 0 else _first(listener)
    if first is None:
        return 0
    # Programs that the imports start must not keep the name of this zygote, or its connections.
    for fd in (plan.listener_fd, plan.output_fd, first.fileno()):
        os.set_inheritable(fd, False)
    environment, began_s = dict(os.environ), time.time()
    framework, files = None, ImportedFiles()
    if not plan.problem:
        # A zygote that begins again has the file of the imports before, which no child may show
        # again.
        os.ftruncate(plan.output_fd, os.lseek(plan.output_fd, 0, os.SEEK_SET))
        keep_freed_memory()
        try:
            with _ending_with(first):
                framework = import_all(plan.framework, plan.preload)
            files.add(began_s)
            problem = _what_is_unsafe()
        except Exception as error:  # noqa: BLE001 (a cold child raises it again, and reports it)
            problem = f"{type(error).__name__}: {error}"
        if problem:
            # The imports' threads and memory go with this image. The next one only answers why it
            # cannot fork.
            _begin_again(plan, environment, problem=problem, first_fd=first.fileno())
    job = _Zygote(plan, listener, framework, environment, _files=files).serve(first)
    return job() if job is not None else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
