"""Hadoop's jars on a process's class path, without which libhdfs cannot open `hdfs://`.

Runs in: anywhere

libhdfs finds the jars by CLASSPATH, in which it expands no patterns:
https://hadoop.apache.org/docs/stable/hadoop-project-dist/hadoop-hdfs/LibHdfs.html
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import MutableMapping
from pathlib import Path

from sparkdl.core.settings import Environment

_log = logging.getLogger(__name__)

_DONE = "TFOS_CLASSPATH_UPDATED"
"""TensorFlowOnSpark's mark that the jars are there; so programs that know it add none again."""
_TIMEOUT_S = 60.0


class HadoopClasspath:
    """`hadoop classpath --glob`, which runs while this process does something else."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @classmethod
    def begin(cls) -> HadoopClasspath | None:
        """Start it where HADOOP_PREFIX or HADOOP_HOME is set, unless the jars are there already."""
        home = Environment.read().hadoop_home
        if home is None or _DONE in os.environ:
            return None
        command = [str(Path(home, "bin", "hadoop")), "classpath", "--glob"]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            _warn(" ".join(command), str(error))
            return None
        return cls(process)

    def finish(
        self, environ: MutableMapping[str, str] = os.environ, timeout_s: float = _TIMEOUT_S
    ) -> None:
        """Append the jars to CLASSPATH. A failure is logged: not everybody wants HDFS.

        Args:
            timeout_s: seconds it may still take.
        """
        command = " ".join(map(str, self._process.args))  # type: ignore[arg-type]
        with self._process as process:
            try:
                jars, problem = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                _warn(command, f"it took longer than {timeout_s:g} s")
                return
        if process.returncode or not jars.strip():
            _warn(command, f"status {process.returncode}, {problem.strip() or 'no class path'}")
            return
        parts = [environ.get("CLASSPATH", ""), jars.strip()]
        environ["CLASSPATH"] = os.pathsep.join(part for part in parts if part)
        environ[_DONE] = "1"


def _warn(command: str, problem: str) -> None:
    _log.warning(
        "Hadoop's jars are not on the class path, so hdfs:// may not open: %s: %s. "
        "HADOOP_PREFIX or HADOOP_HOME should be Hadoop's folder",
        command,
        problem,
    )
