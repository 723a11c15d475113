"""Jobs of Spark say what they are, and leave the user's own names as they were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sparkdl.core.jobs import named_jobs
from tests.doubles.sessions import jobs_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

GROUP, WORDS = "spark.jobGroup.id", "spark.job.description"


def test_a_job_has_its_name_group_and_tag_and_none_stays_behind(spark_local: SparkSession) -> None:
    context: Any = spark_local.sparkContext
    with pytest.raises(KeyError), named_jobs(spark_local, "sparkdl c", "a, b"):
        spark_local.range(3).count()
        raise KeyError
    job, *_ = jobs_of(spark_local)
    assert (job.group, job.description) == ("sparkdl c", "sparkdl c: a, b")
    assert {"sparkdl", "sparkdl c"} < job.tags
    assert set(context.getJobTags()) == set()
    assert [context.getLocalProperty(key) for key in (GROUP, WORDS)] == [None, None]


def test_what_the_user_has_named_keeps_its_words_group_and_tags(spark_local: SparkSession) -> None:
    context: Any = spark_local.sparkContext
    context.setJobGroup("mine", "my own words")
    context.addJobTag("sparkdl c")
    try:
        with named_jobs(context, "sparkdl c", "a job"):
            spark_local.range(3).count()
        job, *_ = jobs_of(spark_local)
        assert (job.group, job.description) == ("mine", "my own words (sparkdl c: a job)")
        assert [context.getLocalProperty(key) for key in (GROUP, WORDS)] == ["mine", "my own words"]
        assert set(context.getJobTags()) == {"sparkdl c"}
    finally:
        context.removeJobTag("sparkdl c")
        for key in (GROUP, WORDS):
            context.setLocalProperty(key, None)


class ConnectSession:
    """The part of a Spark Connect session that tags jobs; like it, without a context."""

    def __init__(self) -> None:
        self.tags = {"mine"}
        self.addTag, self.removeTag = self.tags.add, self.tags.remove

    def getTags(self) -> set[str]:  # noqa: N802 (pyspark calls it so)
        return set(self.tags)


def test_over_spark_connect_the_name_is_a_tag() -> None:
    session = ConnectSession()
    with named_jobs(session, "sparkdl c", "a, b"):
        assert session.tags == {"mine", "sparkdl", "sparkdl c", "sparkdl c: a b"}
    assert session.tags == {"mine"}
