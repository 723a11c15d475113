"""Spark's own scheduler for Kubernetes, on a double of the API server (`doubles/kubernetes.py`)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
import pytest

import sparkdl
from sparkdl.core.deadline import Deadline
from sparkdl.diagnosis.doctor import doctor
from sparkdl.driver.slots.lost_hosts import executors_of
from tests.doubles.kubernetes import API_HOST, Kubernetes, kubernetes
from tests.doubles.ledger import Plan, lost_and_doubled, train
from tests.doubles.nodes import has_checkpoint
from tests.doubles.until import until
from tests.driver.test_draining_integration import is_in_second_world

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
PODS = 3
ROWS = 2 * 8 * 1200
BACK_S = 120.0

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600), pytest.mark.spark]

CONF = {
    "spark.kubernetes.container.image": "spark",
    "spark.kubernetes.allocation.batch.delay": "500ms",
    "spark.executor.instances": str(PODS),
    "spark.executor.cores": "2",
    "spark.executor.memory": "512m",
    "spark.decommission.enabled": "true",
}


@pytest.fixture
def cluster_of_pods(tmp_path: Path) -> Iterator[Kubernetes]:
    with kubernetes(tmp_path) as made:
        yield made


@pytest.fixture
def spark_on_pods(
    cluster_of_pods: Kubernetes, spark_session_on: Callable[..., SparkSession]
) -> SparkSession:
    """A session in client mode, with three executor pods."""
    conf = {**CONF, "spark.driver.host": API_HOST}
    session = spark_session_on(f"k8s://{cluster_of_pods.url}", conf)
    assert until(lambda: len(executors_of(session.sparkContext)) == PODS, BACK_S)
    return session


def pods_of(cluster: sparkdl.Cluster, pods: Kubernetes) -> dict[str, str]:
    """Return the pods of the nodes, by node."""
    by_address = {pod["status"]["podIP"]: name for name, pod in pods.pods().items()}
    return {m.node.name: by_address[m.host] for m in cluster.world.members}


@pytest.mark.parametrize("end", [Kubernetes.kill, Kubernetes.warn])
def test_pod_that_ends_is_replaced_and_no_row_is_lost(
    end: Callable[[Kubernetes, str], None],
    cluster_of_pods: Kubernetes,
    spark_on_pods: SparkSession,
    tmp_path: Path,
) -> None:
    """Killed, or with notice, as where a node of Kubernetes is drained."""
    report = doctor(spark_on_pods, nodes=2, framework="plain")
    assert report.ok, str(report)
    rows = spark_on_pods.range(ROWS, numPartitions=4).withColumnRenamed("id", "row")
    with sparkdl.launch(
        spark_on_pods,
        train,
        Plan(every=10, pause_s=0.1, is_slow_once=True),
        2,
        framework="plain",
        checkpoint_dir=str(tmp_path / "checkpoints"),
        max_restarts=1,
        startup=sparkdl.Startup(placement="attached"),
    ) as cluster:
        feeding = cluster.feed_async(rows)
        assert cluster._controller.wait_for(has_checkpoint, Deadline.after(BACK_S))
        before = pods_of(cluster, cluster_of_pods)
        assert len({*before.values()}) == 2, "each node has an address of its own"
        end(cluster_of_pods, before["worker:1"])
        assert cluster._controller.wait_for(is_in_second_world, Deadline.after(BACK_S))
        assert ("restart 1" in cluster.status()) == (end is Kubernetes.kill)
        feeding.result(2 * BACK_S)
        results = cluster.results(BACK_S)
        assert before["worker:1"] not in pods_of(cluster, cluster_of_pods).values()
    assert lost_and_doubled(results, ROWS) == (0, 0)


def test_program_in_cluster_mode_trains_in_pods(
    cluster_of_pods: Kubernetes, tmp_path: Path
) -> None:
    """The driver is a pod as well, and `spark-submit` waits for its end."""
    url = f"k8s://{cluster_of_pods.url}"
    conf = {
        **CONF,
        "spark.executor.instances": "2",
        "spark.kubernetes.driver.master": cluster_of_pods.url,
        "spark.driver.memory": "512m",
    }
    spark = Path(pyspark.__file__).parent
    done = subprocess.run(
        [
            *(str(spark / "bin" / "spark-submit"), "--master", url, "--deploy-mode", "cluster"),
            *(word for item in conf.items() for word in ("--conf", "=".join(item))),
            f"local://{ROOT}/tests/hosts/train.py",
            *(url, str(tmp_path), "--rows=800", "--fault-within=0"),
        ],
        env=os.environ | {"SPARK_HOME": str(spark)},
        capture_output=True,
        text=True,
        timeout=4 * BACK_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (driver,) = cluster_of_pods.store.list("pods", "spark-role=driver")
    log = cluster_of_pods.log(driver["metadata"]["name"])
    assert driver["status"]["phase"] == "Succeeded", log[-4000:]
    events = [json.loads(line) for line in log.splitlines() if line.startswith('{"event')]
    trained = next(each for each in events if each["event"] == "trained")
    assert (trained["lost"], trained["doubled"]) == (0, 0)
