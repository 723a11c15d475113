"""Reading Spark's errors: of the nodes' job, of any task, and of a stopped context."""

from __future__ import annotations

import re
import sys

from sparkdl.core.errors import ConfigError, LaunchError, SparkdlError
from sparkdl.node.task import parse_problem

_NEEDED = ("sparkdl", "pyarrow", "numpy", "pandas", "cloudpickle", "msgspec", "psutil")
"""The packages that a node's task imports."""


def explain_job_failure(error: Exception) -> SparkdlError:
    """Turn the failure of the nodes' Spark job into an error with a fix."""
    text = str(error)
    if problem := parse_problem(text):
        return problem.at_driver()
    if "PYTHON_VERSION_MISMATCH" in text:
        detail = next(line for line in text.splitlines() if "PYTHON_VERSION_MISMATCH" in line)
        return ConfigError(
            f"driver and executors run different versions of Python: {detail.strip()}. Set "
            "PYSPARK_PYTHON (or spark.pyspark.python) to the same version on all machines"
        )
    if lacking := re.search(f"No module named '({'|'.join(_NEEDED)})'", text):
        return ConfigError(
            f"the executors' Python has no {lacking[1]}. Set PYSPARK_PYTHON to one with it, here "
            f"{sys.executable}; on a cluster install sparkdl-cluster, or ship it by spark.archives"
        )
    if absent := re.search(r'Cannot run program "[^\n]*', text):
        return ConfigError(
            f"an executor cannot start Python: {absent[0]}. Set PYSPARK_PYTHON (or "
            "spark.pyspark.python) to one that all machines have"
        )
    return LaunchError(f"the Spark job that carries the nodes failed: {raised_in_task(error)}")


def raised_in_task(error: Exception) -> str:
    """Return the line of a failed job's error with the exception of Python, or else of the JVM.

    Spark sends no exception from a task, only text: the traceback, and the JVM's around it.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    messages = [line for line in lines if not line.startswith(("at ", "py4j"))]
    in_python = [line for line in messages if "Error: " in line]
    in_jvm = [line.removeprefix(": ") for line in messages if "Exception: " in line]
    return (in_python or in_jvm or lines or [type(error).__name__])[0]
