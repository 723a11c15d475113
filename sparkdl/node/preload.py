"""The module that an agent's fork server imports in advance, and what its forks run.

Runs in: fork server, child

With `max_restarts` an agent starts its children by Python's own fork server
(https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods). That imports
this module, which imports the framework: a restart costs a fork. Where a fork would not be safe,
the fork replaces itself by a cold child, `python -m sparkdl.node.child`.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import sys
import threading
import warnings
from contextlib import suppress
from importlib.machinery import ModuleSpec
from multiprocessing import forkserver, process, resource_tracker
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from sparkdl.core.settings import PRELOADED
from sparkdl.frameworks.framework import Framework
from sparkdl.node import child
from sparkdl.node.child import keep_freed_memory
from sparkdl.node.no_spark import refuse_spark

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
_FORK_SAFE = "jemalloc_bg_thd"
"""Arrow's allocator: jemalloc stops its thread at a fork, and starts it again in the child."""
_MAIN = process.current_process()


_server = SimpleNamespace(
    pid=0, framework=Framework(), problem="", words=[], environment={}, warned=()
)
"""The fork server: what it has imported, and why it must not be forked; empty if it may."""


def _import() -> None:
    agent_pid, framework, modules = json.loads(os.environ.pop(PRELOADED))
    child.die_with(agent_pid)  # even while an import hangs
    keep_freed_memory()
    refuse_spark()
    _server.warned = tuple(warnings.filters)
    _server.pid, _server.words = os.getpid(), [framework, *modules]
    _server.environment = dict(os.environ)  # before an import changes it
    try:
        _server.framework = child.import_all(framework, modules)
        child.import_more(_server.framework)
        _server.problem = _what_is_unsafe()
    except Exception as error:  # noqa: BLE001 (a cold child raises it again, and reports it)
        _server.problem = f"{type(error).__name__}: {error}"
    warnings.simplefilter("ignore")  # JAX warns of threads at a fork, which there are none of
    # Multiprocessing runs the agent's module in forks otherwise.
    sys.modules["__main__"].__spec__ = ModuleSpec("sparkdl.node.agent", None)


def _what_is_unsafe() -> str:
    """Return why this process must not fork, in words; empty if it may."""
    # A fork that does nothing comes first: OpenBLAS ends its threads at each fork, and starts them
    # again when they are needed.
    if not (pid := os.fork()):
        os.kill(os.getpid(), 9)
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


def run(channel: Connection, stacks: Connection, log: Connection) -> None:
    """Be a child, forked by the fork server; the connections stand for descriptors."""
    os.setsid()  # signals for the group reach all that the child starts
    child.die_with(_server.pid)
    for number in (1, 2):
        os.dup2(log.fileno(), number)
    _forget_server()
    fds = [os.dup(each.fileno()) for each in (channel, stacks)]
    for each in (channel, stacks, log):
        each.close()
    if _server.problem:
        sys.stderr.write(f"sparkdl: cold start, without the fork server: {_server.problem}\n")
        sys.stderr.flush()
        for fd in fds:
            os.set_inheritable(fd, True)
        words = [*map(str, (*fds, _server.pid)), *_server.words]
        command = [sys.executable, "-m", "sparkdl.node.child", *words]
        os.execve(sys.executable, command, _server.environment)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # or all children would draw the same numbers
    child.live(fds[0], fds[1], lambda: _server.framework)
    # The fork server ends its forks by `os._exit`.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def _forget_server() -> None:
    """Let multiprocessing be in this process as it is in one that was started by itself."""
    server: Any = forkserver._forkserver
    tracker: Any = resource_tracker._resource_tracker
    # With this end open here the server would outlive its agent.
    os.close(server._forkserver_alive_fd)
    server.__init__()
    os.set_inheritable(tracker._fd, False)
    multiprocessing.set_start_method(None, force=True)
    warnings.filters[:] = _server.warned  # type: ignore[index]
    _MAIN.name = "MainProcess"  # which has been given the fork's
    process._current_process = _MAIN  # type: ignore[attr-defined]
    process._parent_process = None  # type: ignore[attr-defined]
    sys.modules["__main__"].__spec__ = child.__spec__


if PRELOADED in os.environ:
    _import()
