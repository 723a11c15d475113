"""A client of Spark Connect on a network of its own: executors have no route to it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.connect.conftest import CLIENT
from tests.doubles.sessions import make_home
from tests.hosts.bed import SHARED, Bed, Program, _wait_for_text, hosts, why_not
from tests.hosts.connect_client import ROWS

PORT = 15002
SOON_S = 240.0

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900), pytest.mark.spark]


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    """Four hosts: h0 for master and server, h1 and h2 for workers, h3 for the client."""
    if reason := why_not():
        pytest.skip(reason)
    with hosts(tmp_path, "h0", "h1", "h2", "h3") as made:
        yield made


def serve(bed: Bed, **settings: str) -> str:
    """Start a Spark Connect server on h0; return its URL.

    Its Spark has no archive of pyspark, which Python would compile at each start, and Spark gives
    the relay's Python ten seconds.
    """
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


def test_client_that_executors_cannot_reach_trains_by_a_relay_on_the_servers_host(
    bed: Bed,
) -> None:
    url = serve(bed)
    for name in ("h1", "h2"):
        bed[name].lose_what_goes_to(bed["h3"])
    program = client(bed, url, "feeds a table")
    launched = program.wait_for("launched", SOON_S)
    assert launched["hosts"] == [bed["h1"].address, bed["h2"].address]
    assert "spark.createDataFrame(table)" in program.wait_for("table")["error"]
    trained = program.wait_for("trained", SOON_S)
    assert (trained["total"], trained["rows"]) == (sum(range(ROWS)), ROWS)
    assert trained["nbytes"] == [3 << 20] * 2
    checks = program.wait_for("doctor", SOON_S)["checks"]
    ways = [(verdict, text) for name, verdict, text in checks if name == "way to the driver"]
    assert [verdict for verdict, _ in ways] == ["warning", "ok"], checks
    assert all(f"{bed['h0'].address}:" in text for _, text in ways), "of the relay"
    assert not [check for check in checks if check[1] == "problem"], checks
    assert program.wait_for("shut down")["queries"] == 0
    said = program.tail(1000)
    assert f"cannot connect to this client at {bed['h3'].address}:" in said
    assert f"a relay at {bed['h0'].address}:" in said


def test_client_that_executors_reach_needs_no_setting_and_no_relay(bed: Bed) -> None:
    program = client(bed, serve(bed))
    assert program.wait_for("trained", SOON_S)["total"] == sum(range(ROWS))
    program.wait_for("shut down")
    assert "relay" not in program.tail(1000)
