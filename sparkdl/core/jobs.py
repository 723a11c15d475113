"""Jobs of Spark that sparkdl starts: their names in the UI, their tags, how they are cancelled.

Runs in: driver
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

_DESCRIPTION, _GROUP = "spark.job.description", "spark.jobGroup.id"
_INTERRUPTS = "spark.job.interruptOnCancel"
_BATCH_NBYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
_TAG = "sparkdl"
"""The tag of all jobs that sparkdl starts."""


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
    """Describe the jobs that this thread starts as `group: what` in Spark's UI.

    The user's own description stays in front: `their words (group: what)`. A group of the user's
    stays, since `cancelJobGroup` has to find the jobs. They have the tags `group` and `sparkdl` in
    any case. Spark Connect describes jobs itself, by their plan, and has no groups: there the name
    is another tag.

    Args:
        spark: the session or context whose jobs they are.
    """
    name, context = f"{group}: {what}", context_of(spark)
    with ExitStack() as after:
        if context is None:
            tags = (_TAG, group, name.replace(",", ""))  # which a tag may not hold
            after.enter_context(tagged_jobs(spark, *tags))
        else:
            after.enter_context(tagged_jobs(spark, _TAG, group))
            theirs = context.getLocalProperty(_DESCRIPTION)
            _local(after, context, _DESCRIPTION, f"{theirs} ({name})" if theirs else name)
            _local(after, context, _GROUP, context.getLocalProperty(_GROUP) or group)
        yield


def _local(after: ExitStack, context: Any, key: str, value: str) -> None:
    before = context.getLocalProperty(key)
    context.setLocalProperty(key, value)
    after.callback(_unless_gone, context.setLocalProperty, key, before)


def _unless_gone(undo: Callable[..., object], *arguments: object) -> None:
    with suppress(Exception):  # Spark is gone, perhaps
        undo(*arguments)


@contextmanager
def feeding_jobs(spark: Any, batch_nbytes: int) -> Iterator[None]:
    """Let `cancel_jobs` interrupt the tasks of jobs that this thread starts; keep batches small.

    By default Spark only sets a flag. A task that fetches a block from a dead host does not see the
    flag, and holds its slot for two minutes. Spark Connect interrupts all tasks that it cancels.

    Args:
        batch_nbytes: where Spark ends an Arrow batch for Python at the latest, unless the session
            says where. By default it does at 64 MB, which is slower. Connect ignores this, and so
            does a Spark without the setting.
    """
    context = context_of(spark)
    with ExitStack() as after:
        if context is not None:
            _local(after, context, _INTERRUPTS, "true")
            # A task reads Spark's settings from its job's properties. Those of the session replace
            # this one, and no other thread's job has it.
            _local(after, context, _BATCH_NBYTES, str(batch_nbytes))
        yield


@contextmanager
def tagged_jobs(spark: Any, *tags: str) -> Iterator[None]:
    """Tag the jobs that this thread starts in any session, for `cancel_jobs`."""
    context = context_of(spark)
    if context is None:
        there, add, remove = spark.getTags, spark.addTag, spark.removeTag
    else:
        there, add, remove = context.getJobTags, context.addJobTag, context.removeJobTag
    with ExitStack() as after:
        for tag in {*tags} - {*there()}:  # the others are removed where they were added
            add(tag)
            after.callback(_unless_gone, remove, tag)
        yield


def cancel_jobs(spark: Any, tag: str) -> None:
    # A session's tags are those of one thread, but over Spark Connect, where there are no jobs.
    context = context_of(spark)
    if context is None:
        spark.interruptTag(tag)
    else:
        context.cancelJobsWithTag(tag)
