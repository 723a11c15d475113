"""Jobs of Spark: what its UI calls those of sparkdl, and what the error of a failed one says.

Runs in: driver
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

_DESCRIPTION, _GROUP = "spark.job.description", "spark.jobGroup.id"
_INTERRUPTS = "spark.job.interruptOnCancel"
_TAG = "sparkdl"
"""Of all jobs that sparkdl starts."""


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

    A description that the user has set stands before that, in the UI `their words (group: what)`.
    A group of the user's stays, since `cancelJobGroup` has to find the jobs. They have the tags
    `group` and `sparkdl` in any case. Spark Connect describes jobs itself, by their plan, and has
    no groups: there the name is another tag.

    Args:
        spark: the session or context whose jobs they are.
    """
    name, context = f"{group}: {what}", context_of(spark)
    with ExitStack() as after:
        if context is None:
            for tag in (_TAG, group, name.replace(",", "")):  # which a tag may not hold
                _tagged(after, tag, spark.getTags, spark.addTag, spark.removeTag)
        else:
            for tag in (_TAG, group):
                _tagged(after, tag, context.getJobTags, context.addJobTag, context.removeJobTag)
            theirs = context.getLocalProperty(_DESCRIPTION)
            _local(after, context, _DESCRIPTION, f"{theirs} ({name})" if theirs else name)
            _local(after, context, _GROUP, context.getLocalProperty(_GROUP) or group)
        yield


def is_ours(context: Any, job: int) -> bool:
    """Whether `named_jobs` has named a job of this context."""
    tags = context._jsc.sc().statusStore().job(job).jobTags()
    return bool(tags.contains(_TAG))


def _tagged(after: ExitStack, tag: str, tags: Any, add: Any, remove: Any) -> None:
    if tag not in tags():  # else it is removed by whoever has added it
        add(tag)
        after.callback(_unless_gone, remove, tag)


def _local(after: ExitStack, context: Any, key: str, value: str) -> None:
    before = context.getLocalProperty(key)
    context.setLocalProperty(key, value)
    after.callback(_unless_gone, context.setLocalProperty, key, before)


def _unless_gone(undo: Callable[..., object], *arguments: object) -> None:
    with suppress(Exception):  # Spark is gone, perhaps
        undo(*arguments)


@contextmanager
def interruptible_jobs(spark: Any) -> Iterator[None]:
    """Have `cancel_jobs` interrupt the tasks of jobs that this thread starts.

    Spark asks a task to end by a flag otherwise, which it does not see while it fetches a block
    from a host that does not answer: it would hold its slot for two minutes. Spark Connect
    interrupts all tasks that it cancels.
    """
    context = context_of(spark)
    with ExitStack() as after:
        if context is not None:
            _local(after, context, _INTERRUPTS, "true")
        yield


@contextmanager
def tagged_jobs(spark: Any, *tags: str) -> Iterator[None]:
    """Have `cancel_jobs` find the jobs that this thread starts, in whatever session."""
    context = context_of(spark)
    add = spark.addTag if context is None else context.addJobTag
    remove = spark.removeTag if context is None else context.removeJobTag
    for tag in tags:
        add(tag)
    try:
        yield
    finally:
        for tag in tags:
            remove(tag)


def cancel_jobs(spark: Any, tag: str) -> None:
    """Cancel the jobs that have this tag."""
    # A session's tags are those of one thread, but over Spark Connect, where there are no jobs.
    context = context_of(spark)
    if context is None:
        spark.interruptTag(tag)
    else:
        context.cancelJobsWithTag(tag)
