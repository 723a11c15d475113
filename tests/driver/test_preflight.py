"""What can be known before the start: slots, placement, and what a failed job means."""

from __future__ import annotations

from typing import Any

import pytest

from sparkdl.core.errors import ConfigError, FrameworkMissingError, LaunchError
from sparkdl.core.spec import ClusterSpec, InputMode, Placement, plan_nodes
from sparkdl.driver.preflight import (
    Placing,
    Topology,
    choose_placing,
    explain_job_failure,
    node_profile,
)
from sparkdl.node.check import Problem

YARN = "yarn"


def spec(nodes: int, placement: Placement = "auto", is_fed: bool = True) -> ClusterSpec:
    mode = InputMode.SPARK if is_fed else InputMode.TENSORFLOW
    return ClusterSpec("c", plan_nodes(nodes), placement=placement, input_mode=mode)


@pytest.mark.parametrize(
    ("cores", "task_cpus", "slots"),
    [((), 1, 0), ((4,), 1, 4), ((4, 4), 2, 4), ((3, 3), 2, 2), ((5, 1), 2, 2), ((1, 1), 2, 0)],
)
def test_slots_are_counted_per_executor(cores: tuple[int, ...], task_cpus: int, slots: int) -> None:
    assert Topology(YARN, cores, task_cpus).slots == slots


def test_a_topology_says_what_its_slots_are_made_of() -> None:
    assert Topology(YARN, (4, 2), 2).describe() == (
        "3 task slots (2 executors with [4, 2] cores, spark.task.cpus=2)"
    )


@pytest.mark.parametrize("is_fed", [True, False])
@pytest.mark.parametrize("placement", ["auto", "attached", "detached"])
def test_too_few_slots_are_refused_with_the_settings_to_change(
    placement: Placement, is_fed: bool
) -> None:
    with pytest.raises(ConfigError) as refused:
        choose_placing(spec(4, placement, is_fed), Topology(YARN, (2, 1)))
    text = str(refused.value)
    assert text.startswith("4 nodes need 4 task slots at once, and there are 3 task slots (2 exec")
    for setting in ("nodes=", "num_executors=", "spark.executor.instances", "spark.executor.cores",
                    "spark.cores.max", "spark.task.cpus"):  # fmt: skip
        assert setting in text


DYNAMIC = Topology(YARN, (2, 2), is_dynamic=True)


@pytest.mark.parametrize(
    ("wanted", "topology", "placing"),
    [
        # Slots left over: nodes keep theirs.
        (spec(2), Topology(YARN, (2, 1)),
         Placing(True, None, "3 slots, 2 nodes: spare slots feed")),
        (spec(2, "attached"), Topology(YARN, (2, 1)),
         Placing(True, None, "3 slots, 2 nodes: spare slots feed")),
        # None left over, and rows to feed: nodes give theirs back.
        (spec(3), Topology(YARN, (2, 1)),
         Placing(False, None, "3 slots for 3 nodes leave none for feeding")),
        # Nothing to feed: nodes keep theirs.
        (spec(3, is_fed=False), Topology(YARN, (2, 1)),
         Placing(True, None, "3 slots, 3 nodes: nothing has to be fed")),
        (spec(3, "attached", is_fed=False), Topology(YARN, (2, 1)),
         Placing(True, None, "3 slots, 3 nodes: nothing has to be fed")),
        # With dynamic allocation there may be more slots soon.
        (spec(9), DYNAMIC, Placing(True, None, "4 slots, 9 nodes: spare slots feed")),
        (spec(9, "attached"), DYNAMIC, Placing(True, None, "4 slots, 9 nodes: spare slots feed")),
        # What cannot be counted is as the user says.
        (spec(2), None,
         Placing(True, None, "the slots of a Spark Connect session cannot be counted")),
        (spec(2, "detached"), None,
         Placing(False, None, "the slots of a Spark Connect session cannot be counted")),
    ],
)  # fmt: skip
def test_placing(wanted: ClusterSpec, topology: Topology | None, placing: Placing) -> None:
    assert choose_placing(wanted, topology) == placing


def test_detached_is_detached_even_where_slots_are_left_over() -> None:
    placing = choose_placing(spec(1, "detached"), Topology(YARN, (4,)))
    assert (placing.is_attached, placing.node_cpus) == (False, None)


def test_attached_nodes_in_every_slot_could_not_be_fed() -> None:
    with pytest.raises(ConfigError, match=r"keeps all 3 slots.*use placement='detached'"):
        choose_placing(spec(3, "attached"), Topology(YARN, (2, 1)))


def test_detached_nodes_would_lose_their_executors_to_dynamic_allocation() -> None:
    with pytest.raises(ConfigError, match=r"set spark\.dynamicAllocation\.enabled=false"):
        choose_placing(spec(2, "detached"), DYNAMIC)


@pytest.mark.parametrize(
    ("nodes", "topology", "node_cpus"),
    [
        (2, Topology(YARN, (3, 3)), 2),  # two nodes do not fit into three cores
        (2, Topology(YARN, (4, 4)), 3),
        (2, Topology(YARN, (8, 5)), 3),  # the smallest executor decides
        (2, Topology(YARN, (4, 4, 4)), 3),
        (1, Topology("spark://m:7077", (16,)), 9),
        (2, Topology(YARN, (2, 2)), None),  # nothing would be left for feeders
        (2, Topology(YARN, (8,)), None),  # fewer executors than nodes: some share
        (2, Topology(YARN, (4, 4), task_cpus=2), 3),
        (1, Topology(YARN, (8, 8), task_cpus=5), None),
        (2, Topology("local[8]", (8, 8)), None),  # these masters refuse profiles
        (2, Topology("local-cluster[2,4,1024]", (4, 4)), None),
        (2, Topology(YARN, (8, 8), is_dynamic=True), None),
    ],
)
def test_a_node_takes_so_many_cores_that_no_second_fits_and_a_feeder_does(
    nodes: int, topology: Topology, node_cpus: int | None
) -> None:
    placing = choose_placing(spec(nodes), topology)
    assert (placing.is_attached, placing.node_cpus) == (True, node_cpus)
    if node_cpus is not None:
        assert 2 * node_cpus > min(topology.cores)
        assert node_cpus < min(topology.cores)


def test_without_cores_of_its_own_a_node_needs_no_profile() -> None:
    assert node_profile(None) is None


# What a failed job means.


def in_spark(text: str) -> Exception:
    """An executor's exception as it comes out of Spark."""
    return RuntimeError(
        "An error occurred while calling o79.collect.\n"
        ": org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 0.0 "
        "failed 4 times: Traceback (most recent call last):\n"
        f'  File "/x/node/task.py", line 52, in __call__\n{text}\n\n'
        "\tat org.apache.spark.api.python.BasePythonRunner.handle(PythonRunner.scala)\n"
        "\tat java.base/java.lang.Thread.run(Thread.java:829) Error: no\n"
    )


@pytest.mark.parametrize(
    ("kind", "cls"),
    [
        ("FrameworkMissingError", FrameworkMissingError),
        ("ConfigError", ConfigError),
        ("LaunchError", LaunchError),
        ("SomethingElse", LaunchError),
    ],
)
def test_a_problem_found_on_an_executor_is_raised_as_what_it_is(kind: str, cls: type) -> None:
    raised = Problem(kind, "executor a: no 'torch' [\"x\"] \\").error()
    error = explain_job_failure(in_spark(f"sparkdl.core.errors.LaunchError: {raised}"))
    assert type(error) is cls
    assert str(error) == "executor a: no 'torch' [\"x\"] \\"


@pytest.mark.parametrize(
    ("text", "cls", "words"),
    [
        ("pyspark.errors.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has "
         "different version: 3.10 than that in driver: 3.11, …", ConfigError,
         ["3.10 than that in driver: 3.11", "PYSPARK_PYTHON"]),
        ("ModuleNotFoundError: No module named 'sparkdl'", ConfigError,
         ["the executors' Python has no sparkdl", "spark.archives"]),
        ("ModuleNotFoundError: No module named 'sparkdl_extra'", LaunchError,
         ["carries the nodes failed: ModuleNotFoundError: No module named 'sparkdl_extra'"]),
        ("ValueError: what", LaunchError, ["carries the nodes failed: ValueError: what"]),
    ],
    ids=["Python", "no sparkdl", "another module", "anything"],
)  # fmt: skip
def test_what_spark_says_is_turned_into_what_to_do(text: str, cls: type, words: list[str]) -> None:
    error = explain_job_failure(in_spark(text))
    assert type(error) is cls
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize(
    ("error", "first"),
    [
        (RuntimeError("Job 3 cancelled\nby someone"), "Job 3 cancelled"),
        (RuntimeError(), "RuntimeError"),
        (RuntimeError(" \n"), "RuntimeError"),
    ],
)
def test_an_error_without_a_python_traceback_is_told_by_its_first_line(
    error: Exception, first: str
) -> None:
    assert str(explain_job_failure(error)) == (
        f"the Spark job that carries the nodes failed: {first}"
    )


def test_profiles_are_asked_of_spark_only_when_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Builder:
        def require(self, requests: Any) -> Builder:
            asked.append({name: request.amount for name, request in requests.requests.items()})
            return self

        build = "a profile"

    monkeypatch.setattr("sparkdl.driver.preflight.ResourceProfileBuilder", Builder)
    profile: Any = node_profile(3)
    assert (profile, asked) == ("a profile", [{"cpus": 3.0}])
