"""All of sparkdl over Spark Connect, from a client without a JVM: see `client.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.connect.conftest import CLIENT
from tests.doubles.programs import output_of

pytestmark = [pytest.mark.deep, pytest.mark.spark, pytest.mark.xdist_group("connect")]

Client = Callable[[str], dict[str, Any]]


def test_rows_are_fed_and_scored(client: Client) -> None:
    assert client("feeds") == {
        "feed": 780,
        "infer": True,
        "the program's session in another thread": [0, 1],
        "py4j": False,
    }


def test_searches_run_their_trials_side_by_side(client: Client) -> None:
    said = client("search")
    assert said["search"] == ["complete"] * 3


def test_stages_and_pipelines_are_saved_and_loaded(client: Client) -> None:
    assert client("stages") == {
        "estimator": [4, True],
        "pipeline": ["VectorAssembler", "TFEstimator"],
        "py4j": False,
    }


@pytest.mark.torch
def test_large_model_is_trained_saved_and_scores_as_a_file(client: Client) -> None:
    said = client("models")
    assert (said["scores"], said["files"]) == ([40, True], [True, True])


def test_stream_is_refused(client: Client) -> None:
    assert "needs a classic session" in client("stream")["stream"]


def test_faces_take_the_session(client: Client) -> None:
    said = client("faces")
    assert said.pop("Horovod, num_proc").endswith("set num_proc")
    assert "already exists" in said.pop("dfutil again")
    assert said == {
        "TFCluster": 780,
        "TFParallel": [[0, 2], [1, 2]],
        "TFParallel, no barrier": [[0, 3], [1, 3], [2, 3]],
        "Horovod": [40, 40],
        "Horovod, active session": [40],
        "dfutil": [[number, str(number)] for number in range(5)],
        "py4j": False,
    }


def test_training_as_jobs_says_what_to_do_instead(client: Client) -> None:
    assert "train on nodes (mode='nodes')" in client("jobs")["mode='jobs'"]


def test_session_that_is_not_the_programs_own_is_enough(client: Client) -> None:
    said = client("sessions")
    assert said["no session"].startswith("there is no active SparkSession")
    assert (said["feed"], said["stage"]) == (780, True)


def test_client_needs_no_pyspark(connect_url: str) -> None:
    assert "No broken requirements" in output_of(CLIENT, "-m", "pip", "check")
    installed = {line.split("==")[0] for line in output_of(CLIENT, "-m", "pip", "freeze").split()}
    assert "pyspark-client" in installed
    assert not installed & {"pyspark", "py4j"}
