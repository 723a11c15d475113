"""A node's resources on its executor: address, port, GPUs, folder, memory limits, Hadoop's jars.

Runs in: feeder, agent, child
"""

from __future__ import annotations

import logging
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

import psutil

from sparkdl.core.errors import ConfigError
from sparkdl.core.settings import Environment

_log = logging.getLogger(__name__)

_MIN_FEED_NBYTES = 64 * 1024 * 1024
_JARS_ADDED = "TFOS_CLASSPATH_UPDATED"
"""TensorFlowOnSpark's mark of added Hadoop jars: programs that check it then add none."""
_HADOOP_TIMEOUT_S = 60.0
_NUMBER = r"\A(\d+)$"
_LIMIT = {"memory.max": _NUMBER, "memory.limit_in_bytes": _NUMBER}
_OOM_KILLS = dict.fromkeys(("memory.events", "memory.oom_control"), r"^oom_kill (\d+)$")
"""Files of a memory cgroup of version 2, and of version 1, with what to look for there.

https://docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1/memory.html
"""


def own_host(peer: tuple[str, int], environment: Environment) -> str:
    """Return this machine's address on the way to `peer`, which is where peers reach it.

    `SPARKDL_NODE_HOST` overrides it. No packet is sent: connecting a UDP socket only picks a route.
    Where a name has addresses of both kinds, it is one of IPv4.
    """
    if environment.node_host:
        return environment.node_host
    ways = socket.getaddrinfo(*peer, type=socket.SOCK_DGRAM)
    family, kind, _, _, address = min(ways, key=lambda way: way[0] != socket.AF_INET)
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def reserve_port(host: str, environment: Environment) -> socket.socket:
    """Return a socket bound to a free port of `host`, or to `TENSORFLOW_PORT`; not listening."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    # Linux lets a server listen beside this socket if both set the option, as those of TensorFlow,
    # PyTorch and JAX do. So the port is reserved until the server has it.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, environment.node_port or 0))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"port {environment.node_port or 0} of {host} cannot be reserved: {error}. Unset "
            "TENSORFLOW_PORT, or SPARKDL_NODE_HOST if the address is not this executor's"
        ) from None
    return sock


def work_root(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where to put a node's files: the executor's own directory, which Spark cleans up."""
    # Set by a standalone worker, by YARN, and on Kubernetes or by the user, in this order.
    for name in ("SPARK_EXECUTOR_DIRS", "LOCAL_DIRS", "SPARK_LOCAL_DIRS"):
        first = environ.get(name, "").partition(",")[0].partition(os.pathsep)[0]
        if first and Path(first).is_dir():
            return Path(first)
    return Path(tempfile.gettempdir())


def feed_memory(asked_nbytes: int | None) -> int:
    """Return the byte budget of a node's logs: the requested one, or an eighth of the memory."""
    there = min(int(psutil.virtual_memory().total), cgroup_limit() or 1 << 62)
    return max(_MIN_FEED_NBYTES, there // 8) if asked_nbytes is None else asked_nbytes


def feed_disk(asked_nbytes: int | None, folder: Path) -> int:
    """Return how many bytes a node's logs may take on the disk of `folder`.

    The requested number, or a quarter of the free space.
    """
    return shutil.disk_usage(folder).free // 4 if asked_nbytes is None else asked_nbytes


def allow_descriptors() -> None:
    """Raise this process's limit of descriptors to the maximum: each segment of a feed has one."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def oom_kills() -> int:
    return _cgroup(_OOM_KILLS) or 0


def cgroup_limit() -> int | None:
    return _cgroup(_LIMIT)


def _cgroup(wanted: Mapping[str, str]) -> int | None:
    for directory in memory_cgroups():
        for name, pattern in wanted.items():
            with suppress(OSError):
                if found := re.findall(pattern, (directory / name).read_text(), re.MULTILINE):
                    return int(found[-1])
    return None


def memory_cgroups() -> list[Path]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        # Number 0 is the hierarchy of version 2 (cgroups(7)).
        number, controllers, path = line.split(":", 2)
        if number == "0":
            roots = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")]
        elif "memory" in controllers.split(","):
            roots = [Path("/sys/fs/cgroup/memory")]
        else:
            continue
        # In a container the path may be the host's, while its own group is mounted at the root.
        found += [*(root / path.lstrip("/") for root in roots), *roots]
    return found


def executor_jvm_pid() -> int | None:
    """Return the process id of the executor's JVM, from inside a Spark Python worker.

    The worker is forked by pyspark's daemon, which the JVM started. A worker may outlive the
    daemon (killed, or see SPARK-54711): then the JVM is the other end of its connection.
    """
    worker = psutil.Process()
    for parent in worker.parents():
        if "java" in parent.name():
            return int(parent.pid)
    with suppress(psutil.Error):  # not every system shows the connections of other processes
        far = {(c.raddr.port, c.laddr.port) for c in worker.net_connections("tcp") if c.raddr}
        for c in psutil.net_connections("tcp"):
            is_far = c.pid and c.raddr and (c.laddr.port, c.raddr.port) in far
            if is_far and "java" in psutil.Process(c.pid).name():
                return int(c.pid)
    return None


def assigned_gpus() -> tuple[str, ...] | None:
    """Return the addresses of GPUs that Spark assigned to this task; `None` if it assigns none."""
    if sys.modules.get("pyspark") is None:
        return None  # no Spark task: its worker is pyspark's own
    from pyspark import TaskContext

    context = TaskContext.get()
    gpus = context.resources().get("gpu") if context is not None else None
    return tuple(gpus.addresses) if gpus is not None else None


class HadoopClasspath:
    """`hadoop classpath --glob`, which runs while this process does something else.

    libhdfs opens `hdfs://`. It finds Hadoop's jars by CLASSPATH, without expanding patterns there:
    https://hadoop.apache.org/docs/stable/hadoop-project-dist/hadoop-hdfs/LibHdfs.html
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @classmethod
    def begin(cls) -> HadoopClasspath | None:
        """Start it where HADOOP_PREFIX or HADOOP_HOME is set, unless the jars are there already."""
        home = Environment.read().hadoop_home
        if home is None or _JARS_ADDED in os.environ:
            return None
        command = [str(Path(home, "bin", "hadoop")), "classpath", "--glob"]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # its errors go into the child's log
                text=True,
            )
        except OSError as error:
            _warn(" ".join(command), str(error))
            return None
        return cls(process)

    def finish(
        self, environ: MutableMapping[str, str] = os.environ, timeout_s: float = _HADOOP_TIMEOUT_S
    ) -> None:
        """Append the jars to CLASSPATH. A failure is logged: not everybody wants HDFS."""
        command = " ".join(map(str, self._process.args))  # type: ignore[arg-type]
        with self._process as process:
            try:
                jars, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                _warn(command, f"it took longer than {timeout_s:g} s")
                return
        if process.returncode or not jars.strip():
            _warn(command, f"status {process.returncode}, {len(jars)} characters of a class path")
            return
        parts = [environ.get("CLASSPATH", ""), jars.strip()]
        environ["CLASSPATH"] = os.pathsep.join(part for part in parts if part)
        environ[_JARS_ADDED] = "1"


def _warn(command: str, problem: str) -> None:
    _log.warning(
        "Hadoop's jars are not on the class path, so hdfs:// may not open: %s: %s. Set "
        "HADOOP_PREFIX or HADOOP_HOME to Hadoop's folder",
        command,
        problem,
    )
