"""A client of Spark Connect on a network of its own: executors have no route to it."""

from __future__ import annotations

import sys

import pytest

from tests.connect.conftest import CLIENT
from tests.doubles.sessions import make_home
from tests.hosts.bed import SHARED, Bed, Program, _wait_for_text, bed_of
from tests.hosts.connect_client import ROWS

PORT = 15002
SOON_S = 240.0

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900), pytest.mark.spark]


bed = bed_of("h0", "h1", "h2", "h3")
"""Four hosts: h0 for master and server, h1 and h2 for workers, h3 for the client."""


def serve(bed: Bed, **settings: str) -> str:
    """Start a Spark Connect server on h0; return its URL."""
    make_home(bed.folder / SHARED.name / "spark", "python")
    home = str(SHARED / "spark")
    master = bed.start_spark("h0", {"h1": 2, "h2": 2})
    settings |= {"spark.driver.host": bed["h0"].address, "spark.ui.enabled": "false"}
    settings |= {"spark.connect.grpc.binding.port": str(PORT), "spark.executor.memory": "1g"}
    options = [f"--conf={name}={value}" for name, value in settings.items()]
    server = bed["h0"].run(
        *(f"{home}/bin/spark-class", "org.apache.spark.deploy.SparkSubmit", "--master", master),
        *options,
        *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer"),
        *("--driver-memory", "700m", "spark-internal"),
        SPARK_DAEMON_MEMORY="",
        SPARK_HOME=home,
    )
    _wait_for_text(server, "Spark Connect server started")
    return f"sc://{bed['h0'].address}:{PORT}"


def client(bed: Bed, *arguments: str) -> Program:
    python = str(CLIENT) if CLIENT.exists() else sys.executable
    return bed["h3"].run(python, "-m", "tests.hosts.connect_client", *arguments)


def test_launch_by_a_client_that_executors_cannot_reach_names_the_variable_to_set(bed: Bed) -> None:
    url = serve(bed)
    for name in ("h1", "h2"):
        bed[name].lose_what_goes_to(bed["h3"])
    said = client(bed, url).wait_for("refused", SOON_S)["error"]
    assert "Set SPARKDL_DRIVER_HOST" in said
    assert "run the driver in the cluster" in said


def test_client_that_executors_reach_trains(bed: Bed) -> None:
    program = client(bed, serve(bed))
    assert program.wait_for("trained", SOON_S)["total"] == sum(range(ROWS))
    program.wait_for("shut down")
