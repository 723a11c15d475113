"""Spark sessions for tests: one at a time, reused while consecutive tests want the same master."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pyspark.sql import SparkSession

LOCAL = "local[4]"
ML = "local[4] with frameworks"
"""Spark ends Python workers that are idle for a minute, and each new one would import it."""
CLUSTER = "local-cluster[2,2,1024]"
STANDALONE = "standalone"
"""Its master and workers are threads of the driver's JVM."""
NO_WORKERS = "standalone without workers"
"""Until `SparkSessions.add_worker`."""
GPUS_PER_WORKER = 2
"""That Spark discovers on each worker of the standalone cluster; an executor gets one of them."""

CONNECT_SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"
_CLUSTER_VARIABLE = "SPARKDL_TEST_CLUSTER"
"""In the environment of a standalone cluster's daemons, so of executors and of what these start."""
_STARTED_S = 180.0
_STOPPED_S = 10.0
_GONE_S = 60.0
_POLL_S = 0.1


class SparkSessions:
    """Owner of the one Spark session, its JVM and the daemons of the standalone cluster.

    Nothing is written outside `folder`: Spark keeps the folders of its executors under its own
    home, so that home is a copy made of links.

    Args:
        folder: for homes, work, logs and warehouses; short, for it holds sockets.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._master: str | None = None
        self._session: SparkSession | None = None
        self._daemons = ExitStack()
        self.nodes = ExitStack()
        """Clusters that last as long as the session."""
        self._has_cluster = False
        self._extra: Mapping[str, str] = {}

    @property
    def is_active(self) -> bool:
        return self._session is not None

    def get(self, master: str, extra: Mapping[str, str] | None = None) -> SparkSession:
        """Return a session on `master`, a Spark master, `STANDALONE` or `ML`; any other is stopped.

        Args:
            extra: more configuration, for a session of its own.
        """
        is_same = self._master == master and extra is None
        if self._session is not None and is_same and _is_alive(self._session):
            return self._session
        self.stop()
        self._set_home()
        url, special = master, {}
        if master == STANDALONE:
            url, special = self._start_inside(), {"spark.executor.resource.gpu.amount": "1"}
        elif master == NO_WORKERS:
            url = self.start_standalone(workers=0)
        elif master in (LOCAL, ML):
            url = LOCAL
            special = {
                "spark.python.daemon.module": "sparkdl.ml.daemon",
                # Otherwise workers of SQL have a daemon of their own, which imports all again.
                "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "false",
            }
            preloaded = "tensorflow,torch" if master == ML else "numpy"
            special["spark.executorEnv.SPARKDL_PRELOAD"] = preloaded
        self._extra = {**special, **(extra or {})}
        self._session = self._build(url)
        self._master = master if extra is None else None
        _wait_for_executors(self._session, _executors(master))
        return self._session

    def stop(self) -> None:
        """Stop the session and the daemons, if any; the JVM stays for the next session.

        Raises:
            AssertionError: if an executor, or a process that one has started, outlives the daemons.
        """
        self.nodes.close()
        session, self._session, self._master = self._session, None, None
        if session is not None:
            session.stop()
            _forget(self._extra)
        has_cluster, self._has_cluster = self._has_cluster, False
        self._daemons.close()
        if has_cluster and (left := _left_of(str(self._folder))):
            raise AssertionError("a stopped cluster left processes:\n" + "\n".join(left))

    @contextmanager
    def connect_server(self) -> Iterator[str]:
        """Give the URL of a Spark Connect server on a standalone cluster of two workers."""
        before = os.environ.get("SPARK_HOME")
        # Without the archive of pyspark: it would be compiled at each start of a Python process,
        # and Spark gives that of a query ten seconds.
        home = make_home(self._folder / "home", "python")
        os.environ["SPARK_HOME"] = str(home)
        master, port = self.start_standalone(), free_port()
        settings = {"spark.connect.grpc.binding.port": port, "spark.executor.memory": "1g"}
        settings |= {"spark.executor.cores": 3, "spark.ui.enabled": "false"}
        settings |= {"spark.local.dir": self._folder, "spark.driver.host": "127.0.0.1"}
        options = [f"--conf={name}={value}" for name, value in settings.items()]
        submit = ("org.apache.spark.deploy.SparkSubmit", "--master", master, *options)
        server = ("--driver-memory=700m", "--class", CONNECT_SERVER, "spark-internal")
        try:
            self._start_daemon("connect", *submit, *server, SPARK_DAEMON_MEMORY="")
            wait_for_server(port)
            yield f"sc://127.0.0.1:{port}"
        finally:
            try:
                self.stop()
            finally:
                os.environ.pop("SPARK_HOME")
                if before is not None:
                    os.environ["SPARK_HOME"] = before

    def close(self) -> None:
        self.stop()
        if "pyspark" not in sys.modules:
            return
        from pyspark import SparkContext

        gateway: Any = SparkContext._gateway
        if gateway is not None:
            gateway.shutdown()
            gateway.proc.stdin.close()  # upon which the JVM ends
            _end(gateway.proc)
            SparkContext._gateway = SparkContext._jvm = None

    def _set_home(self) -> None:
        if "SPARK_HOME" not in os.environ:
            os.environ["SPARK_HOME"] = str(make_home(self._folder / "home"))
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable

    def discovery_script(self, count: int) -> Path:
        """Write a script as Spark runs it to find a machine's GPUs; each run finds `count` others.

        https://spark.apache.org/docs/latest/configuration.html#custom-resource-scheduling-and-configuration-overview
        """
        folder = Path(tempfile.mkdtemp(prefix="gpus-", dir=self._folder))
        script = folder / "discover"
        addresses = ", ".join(f'\\"$((n + {i}))\\"' for i in range(count))
        script.write_text(
            f"#!/bin/sh\nn=0\nuntil mkdir {folder}/$n 2>/dev/null; do n=$((n + {count})); done\n"
            f'echo "{{\\"name\\": \\"gpu\\", \\"addresses\\": [{addresses}]}}"\n'
        )
        script.chmod(0o700)
        return script

    def _build(self, url: str) -> SparkSession:
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.master(url).appName("sparkdl tests")
        for key, value in {**self._configuration(), **self._extra}.items():
            builder = builder.config(key, value)
        session = builder.getOrCreate()
        session.sparkContext.setLogLevel("ERROR")
        _start_callbacks(session)
        return session

    def _configuration(self) -> Mapping[str, str]:
        return {
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.memory": "768m",
            "spark.executor.memory": "1024m",
            "spark.local.dir": str(self._folder / "local"),
            "spark.sql.warehouse.dir": str(self._folder / "warehouse"),
            "spark.sql.shuffle.partitions": "4",
            "spark.task.maxFailures": "4",
            "spark.port.maxRetries": "64",
        }

    def start_standalone(self, workers: int = 2) -> str:
        """Start the daemons of a standalone cluster, which `stop` ends; return its URL."""
        port = free_port()
        url = f"spark://127.0.0.1:{port}"
        arguments = ("--host", "127.0.0.1", "--webui-port", "0", "--port", str(port))
        self._start_daemon("master", "org.apache.spark.deploy.master.Master", *arguments)
        # Who finds a port and no master behind it yet tries again only after many seconds.
        log, line = self._folder / "master.log", "New state: ALIVE"
        _wait_for(f"{line!r} in {log}", lambda: line in log.read_text(errors="replace"))
        options = " ".join(f"-D{key}={value}" for key, value in self._gpus().items())
        for number in range(workers):
            self.add_worker(url, number, 3, SPARK_WORKER_OPTS=options)
        return url

    def _start_inside(self, workers: int = 2) -> str:
        """Start a standalone cluster in the JVM of the driver, without daemons; return its URL."""
        from pyspark import SparkConf, SparkContext

        context: Any = SparkContext
        context._ensure_initialized(conf=SparkConf().setAll([*self._configuration().items()]))
        conf = context._jvm.org.apache.spark.SparkConf(False)
        for key, value in self._gpus().items():
            conf.set(key, value)
        deploy = context._jvm.org.apache.spark.deploy
        cluster = deploy.LocalSparkCluster.apply(workers, 3, 2048, conf)
        self._daemons.callback(cluster.stop)
        url: str = cluster.start()[0]
        return url

    def _gpus(self) -> Mapping[str, str]:
        gpu, script = "spark.worker.resource.gpu", self.discovery_script(GPUS_PER_WORKER)
        return {f"{gpu}.amount": str(GPUS_PER_WORKER), f"{gpu}.discoveryScript": str(script)}

    def add_worker(self, url: str, number: int, cores: int, **more: str) -> None:
        """Start a worker of the standalone cluster at `url`."""
        arguments = (
            *("org.apache.spark.deploy.worker.Worker", "--host", "127.0.0.1", "--webui-port", "0"),
            *("--cores", str(cores), "--memory", "2g"),
            *("--work-dir", str(self._folder / f"work-{number}"), url),
        )
        self._start_daemon(f"worker-{number}", *arguments, **more)

    def _start_daemon(self, name: str, *arguments: str, **more: str) -> None:
        home = Path(os.environ["SPARK_HOME"])
        common = {"SPARK_DAEMON_MEMORY": "256m", "SPARK_LOCAL_IP": "127.0.0.1"}
        environment = os.environ | common | {_CLUSTER_VARIABLE: str(self._folder)} | more
        self._has_cluster = True
        log = self._daemons.enter_context((self._folder / f"{name}.log").open("wb"))
        daemon = subprocess.Popen(
            [str(home / "bin" / "spark-class"), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
        )
        self._daemons.callback(_end, daemon)


def make_home(home: Path, *without: str) -> Path:
    """Make a home for Spark of links to the one that was installed, and return it."""
    import pyspark

    home.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        if entry.name not in ("work", "logs", *without):
            (home / entry.name).symlink_to(entry)
    return home


def _start_callbacks(session: SparkSession) -> None:
    """Start pyspark's server for calls from the JVM, which would outlive the test that began it."""
    from pyspark import java_gateway

    context: Any = session.sparkContext
    gateway: Any = java_gateway
    gateway.ensure_callback_server_started(context._gateway)


@dataclass(frozen=True)
class Job:
    """A job as Spark's UI shows it, and its REST API: both read the same store."""

    number: int
    description: str
    group: str
    tags: frozenset[str]
    failed_tasks: int


def jobs_of(spark: SparkSession) -> list[Job]:
    """Return all jobs of the application, the latest first."""
    context: Any = spark.sparkContext
    context._jsc.sc().listenerBus().waitUntilEmpty()  # by which the store hears of them
    found = context._jsc.sc().statusStore().jobsList(None)
    return [
        Job(
            job.jobId(),
            job.description().get() if job.description().isDefined() else "",
            job.jobGroup().get() if job.jobGroup().isDefined() else "",
            frozenset(job.jobTags().mkString(",").split(",")),
            job.numFailedTasks(),
        )
        for job in (found.apply(i) for i in range(found.size()))
    ]


def is_java_there() -> bool:
    home = os.environ.get("JAVA_HOME")
    return bool(home and Path(home, "bin", "java").exists()) or shutil.which("java") is not None


def _is_alive(session: SparkSession) -> bool:
    context: Any = session.sparkContext
    return context._jsc is not None and not context._jsc.sc().isStopped()


def _forget(extra: Mapping[str, str]) -> None:
    """Have the JVM forget what its first session's configuration left in its system properties."""
    from pyspark import SparkContext

    jvm: Any = SparkContext._jvm
    for key in extra if jvm is not None else ():
        jvm.java.lang.System.clearProperty(key)


def _executors(master: str) -> int:
    if master == STANDALONE:
        return 2
    if master.startswith("local-cluster["):
        return int(master.removeprefix("local-cluster[").split(",")[0])
    return 0


def _wait_for_executors(session: SparkSession, count: int) -> None:
    """Wait until `count` executors have registered, so that no test depends on which came first."""
    context: Any = session.sparkContext
    tracker = context._jsc.sc().statusTracker()
    what = f"{count} executors of {context.master}"
    _wait_for(what, lambda: len(tracker.getExecutorInfos()) - 1 >= count)


def wait_for_server(port: int) -> None:
    def listens() -> bool:
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    _wait_for(f"a server on port {port}; see its log", listens)


def _wait_for(what: str, is_there: Callable[[], bool]) -> None:
    never = threading.Event()
    end_s = time.monotonic() + _STARTED_S
    while not is_there():
        if time.monotonic() > end_s:
            raise TimeoutError(f"not there after {_STARTED_S} s: {what}")
        never.wait(_POLL_S)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _left_of(cluster: str) -> list[str]:
    """Wait until a cluster's processes have ended; kill the others, and return them in words."""
    never, end_s = threading.Event(), time.monotonic() + _GONE_S
    while (left := _processes_of(cluster)) and time.monotonic() < end_s:
        never.wait(_POLL_S)
    words = []
    for process in left:
        with suppress(psutil.Error):
            parents = [parent.pid for parent in process.parents()]
            words.append(f"{process.pid} of {parents}: {' '.join(process.cmdline())[-300:]}")
            process.kill()
    return words


def _processes_of(cluster: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # ended, a zombie, or another user's
            if process.environ().get(_CLUSTER_VARIABLE) == cluster:
                found.append(process)
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.terminate()
        process.wait(_STOPPED_S)
        return
    process.kill()
    process.wait()
