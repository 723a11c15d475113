"""Jobs of Spark: what its UI calls those of sparkdl, and what the error of a failed one says.

Runs in: driver
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_DESCRIPTION, _GROUP = "spark.job.description", "spark.jobGroup.id"


def context_of(spark: Any) -> Any:
    """Return the SparkContext of a session, or `spark` if it is one; None with Spark Connect."""
    if hasattr(spark, "getLocalProperty"):
        return spark
    try:
        return spark.sparkContext
    except Exception:  # noqa: BLE001 (Connect sessions raise one of several errors here)
        return None


@contextmanager
def named_jobs(spark: Any, group: str, what: str) -> Iterator[None]:
    """Have the jobs that this thread starts say what they are: `group: what`.

    A description and a group that the user has set stay. Spark Connect describes jobs itself, by
    their plan: there they have a tag of this name.

    Args:
        spark: the session or context whose jobs they are.
    """
    name, context = f"{group}: {what}", context_of(spark)
    if context is None:
        tag = name.replace(",", "")  # which a tag may not hold
        spark.addTag(tag)
        try:
            yield
        finally:
            with suppress(Exception):  # Spark is gone, perhaps
                spark.removeTag(tag)
        return
    unset = {_DESCRIPTION: name, _GROUP: group}
    unset = {key: value for key, value in unset.items() if not context.getLocalProperty(key)}
    for key, value in unset.items():
        context.setLocalProperty(key, value)
    try:
        yield
    finally:
        with suppress(Exception):  # Spark is gone, perhaps
            for key in unset:
                context.setLocalProperty(key, None)


def raised_in_task(error: Exception) -> str:
    """Return the line of a failed job's error that says what was raised in Python, or the first.

    Spark sends no exception from a task, only text: the traceback, and the JVM's around it.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    raised = [line for line in lines if "Error: " in line and not line.startswith(("at ", "py4j"))]
    return (raised or lines or [type(error).__name__])[0]
