"""The framework process: imports the framework, waits for the world, runs `map_fun` once.

`python -m sparkdl.node.child CHANNEL_FD STACKS_FD PARENT_PID FRAMEWORK [MODULE …]`, started by an
agent. Each MODULE is imported after the framework. With the world comes the name of a file with the
pickled `(map_fun, args)`, which came inside Spark's own task payload.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import cloudpickle

from sparkdl.control.channel import Raised, Start
from sparkdl.control.messages import ChildReturned, ChildRunning
from sparkdl.control.values import encode_value
from sparkdl.core.errors import ConfigError, ResultError, SparkdlError
from sparkdl.core.failure import Failure, FailureKind
from sparkdl.core.files import SCRATCH, make_scratch_in
from sparkdl.core.imports import quick_imports
from sparkdl.frameworks.framework import Framework, advice_about, framework_named
from sparkdl.node.context import NodeContext, enter, leave
from sparkdl.node.link import AgentLink
from sparkdl.node.no_spark import refuse_spark
from sparkdl.node.resources import HadoopClasspath
from sparkdl.node.waits import WaitWatch

_PR_SET_PDEATHSIG = 1
_MAX_TEXT_CHARS = 256 * 1024
"""The limit for an exception's message and traceback, so that a failure fits into one message."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_OWN = (f"{Path(__file__).parent.parent}{os.sep}", "<frozen runpy>")
"""Files of frames between a node's start and the user's code."""


def main(argv: list[str]) -> None:
    channel_fd, stacks_fd, parent_pid = map(int, argv[:3])
    framework, *preload = argv[3:]
    # Before the imports, which take seconds: the agent may end meanwhile.
    die_with(parent_pid)
    keep_freed_memory()
    live(channel_fd, stacks_fd, partial(import_all, framework, preload))


def live(channel_fd: int, stacks_fd: int, importing: Callable[[], Framework]) -> None:
    """Be a child: import, wait for the world, run `map_fun`."""
    faulthandler.enable()
    refuse_spark()
    _write_stacks_on_signal(stacks_fd)
    link = AgentLink(socket.socket(fileno=channel_fd))
    link.send(_run(importing, link))
    # A full disk under a redirected output must not hide how `map_fun` ended.
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    link.close()


def import_more(framework: Framework) -> None:
    with quick_imports():
        framework.import_more()
    gc.freeze()


def import_all(framework_name: str, preload: Sequence[str]) -> Framework:
    framework = framework_named(framework_name)
    # Begun before the imports, so that Hadoop's script runs beside them.
    jars = HadoopClasspath.begin()
    # In this order, so that variables of the user's override the framework's.
    os.environ.update({**framework.import_environment, **os.environ})
    with quick_imports():
        framework.import_modules()
        _preload(preload)
    gc.freeze()  # the collector skips the imported objects from now on
    if jars:
        jars.finish()
    return framework


def _run(importing: Callable[[], Framework], link: AgentLink) -> ChildReturned | Raised:
    # Stands in until the imports have succeeded, for errors that they raise.
    framework = Framework()
    kind: FailureKind = "setup"
    has_world = False
    try:
        framework = importing()
        # Without a limit: the agent ends a child whose world does not come.
        start, port = link.wait_start(partial(import_more, framework))
        has_world = True
        os.environ.update(start.environment)
        payload = Path(start.payload)
        map_fun, args = cloudpickle.loads(payload.read_bytes())
        ctx = _prepare(framework, start, link, port, payload.parent / SCRATCH)
        # TensorFlowOnSpark does the same with a list: `map_fun` may parse its own command line.
        if isinstance(args, list):
            sys.argv = args
        # Errors before this line are failures of the set-up, those after it are the user's.
        kind = "exception"
        generation = start.world.generation
        link.send(ChildRunning(generation, os.getpid()))
        if ctx.member.role.is_server:
            # Never returns: the agent ends a server.
            framework.serve()
        others = len(start.world.trainers) > 1 and ctx.member.role.is_trainer and not ctx.num_gpus
        with WaitWatch(link.send, others):
            value, has_exited = _call(map_fun, args, ctx)
        link.feeds.registry.watch.look()
        leave(ctx)
        link.feeds.report()
        framework.after_map_fun(has_failed=False)
        return _encode(generation, value, has_exited)
    except SystemExit as stop:
        # As in Python itself, a text or any other object means status 1.
        code = stop.code if isinstance(stop.code, int) else 1
        return _raised(framework, has_world, "exit", stop, code, link.feeds.steps)
    except BaseException as error:  # noqa: BLE001 (whatever user code raises goes to the driver)
        cause, steps = link.feeds.cause_of(error), link.feeds.steps
        return _raised(framework, has_world, kind, cause, None, steps)


def _preload(modules: Sequence[str]) -> None:
    for name in modules:
        try:
            import_module(name)
        except Exception as error:
            raise ConfigError(
                f"Startup(preload=…) names {name!r}, which cannot be imported on "
                f"{socket.gethostname()}: {type(error).__name__}: {error}. Repair or "
                "install it there, or leave it out"
            ) from error


def _prepare(
    framework: Framework, start: Start, link: AgentLink, port: socket.socket, scratch: Path
) -> NodeContext:
    member = start.world.member(start.node_id)
    os.environ.update(framework.environment(start.world, member, start.spec))
    make_scratch_in(scratch)
    ctx = NodeContext(start.world, member, start.spec, link, port, start.resume, scratch)
    enter(ctx)
    framework.before_map_fun(start.world, member)
    # Last of all, so that another process has the least time to take the port.
    if start.spec.release_port or member.role.is_server:
        ctx.release_port()
    return ctx


def _call(
    map_fun: Callable[[Any, NodeContext], Any], args: Any, ctx: NodeContext
) -> tuple[Any, bool]:
    """Return what `map_fun` returns, and whether it has exited without an error instead."""
    try:
        return map_fun(args, ctx), False
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise
        return None, True


def _encode(generation: int, value: Any, has_exited: bool) -> ChildReturned:
    try:
        return ChildReturned(generation, encode_value(value), has_exited=has_exited)
    except ResultError as error:
        return ChildReturned(generation, b"", str(error))


def _raised(
    framework: Framework,
    has_world: bool,
    kind: FailureKind,
    error: BaseException,
    exit_code: int | None,
    steps: int,
) -> Raised:
    raised_s = time.monotonic()  # now: what follows takes time, and others fail because of this
    advice = advice_about(error, framework.name)
    if kind in ("setup", "exception") and framework.is_port_lost(error):
        kind = "port"
    if has_world:
        with suppress(Exception):  # the first error matters more
            framework.after_map_fun(has_failed=True)
    return Raised(
        Failure(
            node="",  # its agent completes the place
            kind=kind,
            message="\n".join(filter(None, (_in_short(error)[:_MAX_TEXT_CHARS], advice))),
            time_s=time.time(),
            pid=os.getpid(),
            exit_code=exit_code,
            exception_type=f"{type(error).__module__}.{type(error).__qualname__}",
            # The end of a traceback names the error, so the beginning is cut.
            traceback=user_traceback(error)[-_MAX_TEXT_CHARS:],
            step=steps,
            is_consequence=kind == "exception" and framework.is_peer_lost(error),
        ),
        raised_s,
    )


def _in_short(error: BaseException) -> str:
    """Return an error's type and text; without sparkdl's note, which the traceback has."""
    if isinstance(error, SparkdlError):
        return f"{type(error).__module__}.{type(error).__qualname__}: {error}"
    return _plain("".join(traceback.format_exception_only(error)).strip())


def user_traceback(error: BaseException) -> str:
    """Return the traceback of what user code raised, without sparkdl's frames that led to it."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename.startswith(_OWN):
        trace = trace.tb_next
    shown = trace or error.__traceback__  # an error of sparkdl's frames alone keeps them all
    return _plain("".join(traceback.format_exception(type(error), error, shown)))


def _plain(text: str) -> str:
    return _COLOURS.sub("", text)


def _write_stacks_on_signal(fd: int) -> None:
    """Write the stacks of all threads into `fd` on SIGUSR1, which the agent has held back."""
    os.set_inheritable(fd, False)
    faulthandler.register(signal.SIGUSR1, file=fd, all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def die_with(parent_pid: int) -> None:
    """Ask the kernel to kill this process with its parent; elsewhere the pipe's end does it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it ended before the kernel was asked, and sends no signal
            os.kill(os.getpid(), signal.SIGKILL)


_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_NBYTES = 128 * 1024 * 1024
_LARGEST_NBYTES = 32 * 1024 * 1024
"""The most that glibc accepts; larger blocks are mapped and unmapped each time."""
_USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Let glibc give free memory back to the system only if it has more than 128 MiB of it.

    On the CPU a step of training allocates and frees the same megabytes again and again. By default
    glibc returns what lies free at the end of its heap, 64 MiB or less of it, and takes it again in
    the next step: then the kernel has to clear each page. A step of the network of `make bench
    NAME=job` takes 10.5 ms instead of 13.3 ms this way. Nothing is changed if the user has set
    glibc's own variables, or if the C library is another one. See mallopt(3).
    """
    if any(name in os.environ for name in _USERS_OWN):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_NBYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_NBYTES)


if __name__ == "__main__":
    main(sys.argv[1:])
