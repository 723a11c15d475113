"""The leak police: what a test may not leave behind, and how that is found out.

What this test run holds after a test and did not hold before has `DEADLINE_S` to go away, for much
ends asynchronously; what remains and is not on the list of the allowed is a leak.
"""

from __future__ import annotations

import fnmatch
import gc
import os
import resource
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

RUN_VARIABLE = "SPARKDL_TEST_RUN"
"""In the environment of every process of this test run, orphans included: the name of the run."""

DEADLINE_S = float(os.environ.get("LEAK_DEADLINE_S", "15"))
"""Costs time only where there is a leak; what ends within a second takes ten on a busy machine."""
_POLL_S = 0.05

Belonging = tuple[str, Any]
"""A kind and, hashable, which one of that kind."""

ALLOWED = (  # kind, pattern (fnmatch) of its description, why it is no leak
    ("thread", "pytest_timeout *", "pytest-timeout's"),
    ("thread", "MlflowLocalArtifactRepository*", "MLflow's pool of uploads, kept with the place"),
    ("thread", "Dummy-*", "TensorFlow's own, which has called Python that started a thread"),
    ("thread", "tqdm_monitor", "tqdm's, one for the life of a process"),
    ("thread", "asyncio_*", "an event loop's resolver pool, idle once its loop is closed"),
    ("thread", "Thread-* (_serve)", "multiprocessing's, which passes on tensors in shared memory"),
    ("process", "*multiprocessing.resource_tracker*", "one for the life of a process"),
    ("process", "*multiprocessing.forkserver*", "one for the life of a process"),
    ("file descriptor", "/dev/null", "libraries keep it"),
    ("file descriptor", "/dev/*random", "libraries keep it"),
    ("file descriptor", "/dev/nvidia*", "CUDA keeps its devices"),
    ("file descriptor", "/proc/*", "libraries that look at the machine keep it"),
    ("file descriptor", "/sys/*", "libraries that look at the machine keep it"),
    ("file descriptor", "*/site-packages/*", "a library's own file"),
    ("file descriptor", "anon_inode:*event*", "gRPC's pollers, in Flight and TensorFlow"),
    ("file descriptor", "Unix socket */pymp-*", "that of multiprocessing's thread"),
    ("environment variable", "PYTEST_*", "pytest's"),
    ("environment variable", "COV_CORE_*", "pytest-cov's"),
    ("environment variable", "TF2_BEHAVIOR", "set when TensorFlow is imported"),
    ("environment variable", "TF_*", "set when TensorFlow or Keras is imported"),
    ("environment variable", "ENABLE_RUNTIME_UPTIME_TELEMETRY", "set when TensorFlow is imported"),
    ("environment variable", "HDF5_PLUGIN_PATH", "set when h5py is imported, by Keras"),
    ("environment variable", "KMP_*", "set when an OpenMP is loaded"),
    ("environment variable", "TORCHINDUCTOR_*", "set when PyTorch's compiler is imported"),
    ("environment variable", "PYTORCH_NVML_*", "set when Lightning is imported"),
    ("environment variable", "TPU_*", "set when TensorFlow or JAX is imported"),
)
ALLOWED_WITH_SPARK = (
    ("thread", "Thread-*", "py4j's and pyspark's have no better names"),
    ("process", "*java *org.apache.spark.*", "the driver's JVM, executors, standalone daemons"),
    ("process", "*bash *spark-class*", "the shell that becomes a JVM"),
    ("process", "*pyspark*daemon*", "Spark's Python workers wait for the next task"),
    ("process", "*pyspark*worker*", "Spark's Python workers wait for the next task"),
    ("process", "*-m sparkdl.ml.daemon*", "likewise; Spark 3.5 does not name pyspark.worker there"),
    ("process", "*sparkdl.ml.scoring.scorer*", "keeps its model until its executor ends"),
    ("temporary folder", "*/sparkdl-scorer-*", "the socket of such a scorer"),
    ("file descriptor", "socket to a JVM", "py4j keeps connections, some for each thread"),
    ("file descriptor", "socket unconnected", "a connection of py4j that the JVM has closed"),
    ("environment variable", "SPARK_*", "set by pyspark for its workers"),
    ("environment variable", "PYSPARK_*", "set by pyspark for its workers"),
)


@dataclass(frozen=True)
class Police:
    """Remembers what there is when it is made; `leaks` says what has come since.

    Attributes:
        run: the value of `RUN_VARIABLE` that the processes of this run inherit.
        has_spark: whether a Spark session lives, whose own belongings are no leaks.
        deadline_s: how long what ends asynchronously may take.
        shared_memory: where that is. Files there are of no process: a test that leaves one on
            purpose does so elsewhere, or every other worker of pytest-xdist would be blamed for it.
    """

    run: str
    has_spark: bool = False
    deadline_s: float = DEADLINE_S
    shared_memory: Path = Path("/dev/shm")
    before: frozenset[Belonging] = field(init=False)
    waited_for: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "waited_for", _waited_for())
        object.__setattr__(self, "before", frozenset(self._belongings()))

    def leaks(self) -> list[str]:
        """Wait until nothing is left behind or time is up; return what is left, in words."""
        end_s = time.monotonic() + self.deadline_s
        never = threading.Event()
        while left := self._left():
            gc.collect()  # what only a cycle of references holds is garbage, not a leak
            if time.monotonic() > end_s:
                return [f"{kind}: {words}" for (kind, _), words in left.items()]
            never.wait(_POLL_S)
        return []

    def clean_up(self) -> None:
        """Kill the processes left and restore the environment, for the sake of the next test."""
        for kind, which in self._left():
            if kind == "process":
                _kill(which)
        before = dict(which for kind, which in self.before if kind == "environment variable")
        for name in os.environ.keys() - before.keys():
            if not name.startswith("PYTEST_"):
                del os.environ[name]
        os.environ.update(before)

    def _left(self) -> dict[Belonging, str]:
        now = frozenset(self._belongings())
        left = {belonging: _describe(*belonging) for belonging in now - self.before}
        left |= {
            ("environment variable", which): f"{which[0]} (removed)"
            for kind, which in self.before
            if kind == "environment variable" and which[0] not in os.environ
        }
        return {
            belonging: words
            for belonging, words in left.items()
            if words and not self._is_allowed(belonging[0], words)
        }

    def _is_allowed(self, kind: str, words: str) -> bool:
        rows = ALLOWED + ALLOWED_WITH_SPARK if self.has_spark else ALLOWED
        if "sparkdl.node" in words:
            return False  # whatever else its command line holds
        return any(kind == row[0] and fnmatch.fnmatchcase(words, row[1]) for row in rows)

    def _belongings(self) -> Iterator[Belonging]:
        yield from (("thread", thread) for thread in threading.enumerate())
        yield from (("process", process) for process in self._processes())
        yield from (("file descriptor", which) for which in _descriptors())
        yield from (("shared memory", path) for path in self.shared_memory.glob("sparkdl*"))
        folders = Path(tempfile.gettempdir()).glob("sparkdl-*")
        yield from (("temporary folder", path) for path in folders)
        yield from (("environment variable", item) for item in os.environ.items())

    def _processes(self) -> set[psutil.Process]:
        """Look at the machine's processes, unless none can have been started.

        That look reads the environment of each, and most tests start none. What a test starts
        is a child of this process until it has been waited for, and counts afterwards.
        """
        is_possible = _has_children() or _waited_for() != self.waited_for
        return _processes(self.run) if is_possible else set()


def _has_children() -> bool:
    if not hasattr(os, "waitid"):  # macOS
        return True
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # WNOWAIT: it only looks
    except ChildProcessError:
        return False
    return True


def _waited_for() -> int:
    """Return a number that grows with each child that has been waited for: their page faults."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


def _processes(run: str) -> set[psutil.Process]:
    """Return the descendants of this process, and whatever else carries the mark of this run."""
    me = psutil.Process()
    return {*me.children(recursive=True), *_marked(run)} - {me}


def _marked(run: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # ended, a zombie, or another user's
            if process.environ().get(RUN_VARIABLE) == run:
                yield process


def _descriptors() -> Iterator[tuple[int, str]]:
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # the descriptor of the listing itself; on some systems, any
            yield int(name), os.readlink(f"/dev/fd/{name}")


def _describe(kind: str, which: Any) -> str:
    """Return words for a belonging, or nothing if it has just gone."""
    if kind == "thread":
        return str(which.name)
    if kind == "process":
        return _describe_process(which)
    if kind == "file descriptor":
        fd, target = which
        return _describe_socket(fd) if target.startswith("socket:") else target
    return str(which[0]) if kind == "environment variable" else str(which)


def _describe_process(process: psutil.Process) -> str:
    try:
        if process.status() != psutil.STATUS_ZOMBIE:
            return f"{process.pid} {' '.join(process.cmdline()) or process.name()}"
        return f"{process.pid} ended, but nobody waited" if process.ppid() == os.getpid() else ""
    except psutil.Error:
        return ""


def _describe_socket(fd: int) -> str:
    ours = [c for c in psutil.Process().net_connections("all") if c.fd == fd]
    if not ours:
        return ""
    (socket,) = ours
    if socket.status == psutil.CONN_LISTEN:
        return f"socket listening on {socket.laddr}"
    if isinstance(socket.laddr, str):
        return f"Unix socket {socket.laddr}"
    if not socket.raddr or socket.status == psutil.CONN_CLOSE_WAIT:
        return "socket unconnected"
    return "socket to a JVM" if _is_jvms(socket.raddr.port) else f"socket to {socket.raddr}"


def _is_jvms(port: int) -> bool:
    for process in _java(psutil.Process().children(recursive=True)):
        if any(c.laddr.port == port for c in process.net_connections("inet") if c.laddr):
            return True
    return False


def _java(processes: Iterable[psutil.Process]) -> Iterator[psutil.Process]:
    for process in processes:
        with suppress(psutil.Error):
            if process.name() == "java":
                yield process


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.Error):
        process.kill()
        process.wait(1)
