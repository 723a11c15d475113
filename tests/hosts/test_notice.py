"""The host of a Spark worker is about to end, as a spot instance is, and then loses its power.

Spark gets the notice by SIGPWR to the worker's process. All other ways in which nodes could leave
the host take longer than these tests wait: `PATIENT`.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.until import until
from tests.hosts.bed import SHARED, Bed, Host, Program, hosts, why_not

ENDED_S, LAUNCHED_S, LEFT_S = 240.0, 300.0, 240.0
ROWS = 9600
PATIENT = {"host_timeout_s": 600.0, "wait_s": 600.0}
NOTICE = {"spark.decommission.enabled": "true"}
AGENT, EXECUTOR, WORKER = "sparkdl.node.agent", "CoarseGrainedExecutorBackend", "worker.Worker"

pytestmark = [pytest.mark.deep, pytest.mark.timeout(1500), pytest.mark.spark]


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    """Four hosts: h0 for the driver and Spark's master, the others for workers."""
    if reason := why_not():
        pytest.skip(reason)
    with hosts(tmp_path, "h0", "h1", "h2", "h3") as made:
        yield made


def train_on(bed: Bed, workers: dict[str, int], nodes: int) -> tuple[Program, Host]:
    """Train nodes that make a checkpoint only if asked; return the driver, the last node's host.

    Args:
        workers: task slots by host.
    """
    settings = " ".join(f"-D{name}={value}" for name, value in NOTICE.items())
    url = bed.start_spark("h0", workers, SPARK_WORKER_OPTS=settings)
    driver = bed["h0"].run(
        *(sys.executable, "-m", "tests.hosts.train", url, str(SHARED), f"--rows={ROWS}"),
        *(
            f"--nodes={nodes}",
            "--every=100000",
            "--pause=0.1",
            "--slow-once",
            f"--fault-within={LEFT_S}",
        ),
        f"--spark={json.dumps(NOTICE)}",
        f"--options={json.dumps({'recovery': PATIENT, 'startup': {'placement': 'attached'}})}",
    )
    address = driver.wait_for("rows", LAUNCHED_S)["nodes"][f"worker:{nodes - 1}"]
    return driver, next(host for host in bed.hosts.values() if host.address == address)


def give_notice(host: Host) -> None:
    (worker,) = host.processes(WORKER)
    worker.send_signal(signal.SIGPWR)


def assert_left(driver: Program, host: Host) -> dict[str, str]:
    """All left within the notice, so the end of the host harms nothing; return where nodes are."""
    nodes: dict[str, str] = driver.wait_for("again", LEFT_S)["nodes"]
    assert host.address not in nodes.values()
    assert until(lambda: not host.processes(AGENT), LEFT_S), "an agent stays"
    assert until(lambda: not host.processes(EXECUTOR), LEFT_S), "a task or its executor stays"
    host.power_off()
    assert driver.wait_for("fed", ENDED_S)["rows_used"] == ROWS
    trained = driver.wait_for("trained", ENDED_S)
    assert (trained["lost"], trained["doubled"]) == (0, 0)
    driver.wait_for("shut down", ENDED_S)
    assert driver.process.wait(ENDED_S) == 0
    said = driver.output.read_text(errors="replace")
    assert "Spark decommissions the executors of" in said
    for sign in ("does not answer", "restart 1 of", "did not end in time"):
        assert sign not in said, sign
    return nodes


def test_node_moves_to_another_host_before_its_own_loses_power(bed: Bed) -> None:
    driver, host = train_on(bed, {"h1": 3, "h2": 3, "h3": 3}, nodes=2)
    give_notice(host)
    assert [*assert_left(driver, host)] == ["worker:0", "worker:1"]
