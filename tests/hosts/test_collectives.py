"""Nodes are in the middle of a collective when the host of one of them goes.

gloo would wait for half an hour, and XLA for heartbeats; where the lost host's last words still
arrive, these libraries speak first, and blame a connection. The nodes run on two hosts, without
Spark (`tests/hosts/collective.py`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import pytest

from tests.doubles.nodes import all_gone
from tests.hosts.bed import SHARED, Bed, Host, Program
from tests.hosts.collective import ROWS, STEPS

ENDED_S = 120.0
NOTICED_S = 8.0 + 8.0
"""`host_timeout`, and as much again for a machine that is busy."""
CHECKPOINTS = {"checkpoint_dir": str(SHARED / "checkpoints")}
RESTARTS = {"max_restarts": 2, "recovery": {"min_nodes": 1, "wait_s": 5.0}, **CHECKPOINTS}
HOSTS = {0: "h1", 1: "h2"}

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]
each_way = pytest.mark.parametrize(
    "way",
    [
        pytest.param("ddp", marks=pytest.mark.torch),
        pytest.param("horovod", marks=pytest.mark.torch),
        pytest.param("strategy", marks=pytest.mark.tensorflow),
        pytest.param("jax", marks=pytest.mark.jax),
    ],
)


def started(
    bed: Bed,
    way: str,
    options: Mapping[str, object],
    *arguments: str,
    environments: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Program:
    """Start a training by two nodes, and wait until it has a checkpoint.

    Args:
        options: of the launch.
        environments: of the nodes by host, `NAME=value` as a shell reads it.
    """
    hosts = [[*bed[name].entering(), "env", *environments.get(name, ())] for name in HOSTS.values()]
    driver = bed["h0"].run_above(
        *(sys.executable, "-m", "tests.hosts.collective", way, json.dumps(hosts)),
        f"--address={bed['h0'].address}",
        f"--options={json.dumps(options)}",
        *arguments,
        STARTERS=str(bed.folder),
    )
    found = driver.wait_for("checkpoint", ENDED_S)["hosts"]
    assert found == [bed[name].address for name in HOSTS.values()]
    return driver


def lose(bed: Bed, driver: Program, rank: int, how: Callable[[Host], None]) -> tuple[Host, Host]:
    """Lose the host of a rank; wait until the driver knows; return that host, and the other one."""
    lost, left = bed[HOSTS[rank]], bed[HOSTS[1 - rank]]
    how(lost)
    lost_s = time.monotonic()
    assert driver.wait_for("noticed", ENDED_S)["at_s"] - lost_s < NOTICED_S
    return lost, left


def assert_nothing_is_left(driver: Program, *hosts: Host) -> None:
    driver.wait_for("shut down", ENDED_S)
    for host in hosts:
        assert all_gone(host.processes("sparkdl.node"))


@each_way
@pytest.mark.parametrize(("rank", "how"), [(0, Host.lose_what_comes), (1, Host.cut)])
def test_training_goes_on_without_the_lost_host(
    bed: Bed, way: str, rank: int, how: Callable[[Host], None]
) -> None:
    driver = started(bed, way, RESTARTS)
    lost, left = lose(bed, driver, rank, how)
    assert driver.wait_for("again", ENDED_S)["hosts"] == [left.address]
    assert driver.wait_for("trained", ENDED_S)["total"] == pytest.approx(STEPS)
    assert f"{lost.address} was lost: {lost.address} has not answered for 8 s" in driver.tail(400)
    assert_nothing_is_left(driver, lost, left)


@pytest.mark.torch
def test_fed_training_goes_on_without_the_lost_host(bed: Bed) -> None:
    driver = started(bed, "ddp", RESTARTS, "--fed")
    lost, left = lose(bed, driver, 1, Host.cut)
    assert driver.wait_for("trained", ENDED_S)["total"] == ROWS
    assert_nothing_is_left(driver, lost, left)


@each_way
@pytest.mark.parametrize(("rank", "how"), [(0, Host.cut), (1, Host.lose_what_comes)])
def test_error_names_lost_host(bed: Bed, way: str, rank: int, how: Callable[[Host], None]) -> None:
    driver = started(bed, way, CHECKPOINTS)
    lost, left = lose(bed, driver, rank, how)
    failed = driver.wait_for("failed", ENDED_S)
    assert (failed["type"], failed["kind"]) == ("NodeLostError", "lost"), failed
    assert failed["host"] == lost.address
    assert f"{lost.address} has not answered for 8 s" in failed["message"]
    assert_nothing_is_left(driver, lost, left)
