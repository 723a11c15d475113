"""Hosts with unusual names and addresses: by which of them the others reach a node.

The nodes run on two hosts, without Spark unless a test says otherwise, and are fed.
"""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.hosts.bed import IPV6, SHARED, Bed, Program, bed_of
from tests.hosts.collective import ROWS
from tests.hosts.test_collectives import each_way

SOON_S = 60.0
SPARK_S = 150.0
ELSEWHERE = "10.99.0.5"
"""An address of a host to which no other one has a route."""


def training(bed: Bed, driver_host: str, way: str = "plain", *environment: str) -> Program:
    """Start a driver program on h0, whose nodes are on h1, in this environment, and h2."""
    nodes = [[*bed["h1"].entering(), "env", *environment], bed["h2"].entering()]
    return bed["h0"].run_above(
        *(sys.executable, "-m", "tests.hosts.collective", way, json.dumps(nodes)),
        *(f"--address={driver_host}", "--fed", "--pause=0"),
        STARTERS=str(bed.folder),
    )


def trained(bed: Bed, driver_host: str, way: str = "plain") -> list[str]:
    """Train on h1 and h2; return the addresses by which the nodes know each other."""
    driver = training(bed, driver_host, way)
    launched = driver.wait_for("launched", SOON_S)
    assert driver.wait_for("trained", SOON_S)["total"] == ROWS
    driver.wait_for("shut down", SOON_S)
    return [str(host) for host in launched["hosts"]]


@pytest.mark.smoke
def test_nodes_are_known_by_the_address_that_is_reached_and_by_no_name(bed: Bed) -> None:
    for name in ("h1", "h2"):
        bed[name].add_address(f"{ELSEWHERE}/32", "lo")
    bed["h0"].know_only(h0=bed["h0"].address)
    assert trained(bed, "h0") == [bed["h1"].address, bed["h2"].address]


@pytest.mark.deep
@pytest.mark.smoke
def test_address_that_others_do_not_reach_says_what_to_set(bed: Bed) -> None:
    bed["h1"].add_address(f"{ELSEWHERE}/32", "lo")
    driver = training(bed, bed["h0"].address, "plain", f"SPARKDL_NODE_HOST={ELSEWHERE}")
    driver.wait_for("shut down", SOON_S)
    driver.process.wait(SOON_S)
    assert re.search(rf"FeederError: .*{ELSEWHERE}.* set SPARKDL_NODE_HOST on its", driver.tail())


@pytest.mark.deep
def test_address_that_is_not_the_executors_says_what_to_set(bed: Bed) -> None:
    driver = training(bed, bed["h0"].address, "plain", f"SPARKDL_NODE_HOST={ELSEWHERE}")
    driver.process.wait(SOON_S)
    assert f"of {ELSEWHERE} cannot be reserved" in driver.tail()


@pytest.mark.deep
@pytest.mark.smoke
def test_name_that_means_loopback_at_the_driver_says_what_to_set(bed: Bed) -> None:
    """As Debian has it in /etc/hosts."""
    bed["h0"].know_only(h0="127.0.1.1")
    driver = training(bed, "h0")
    driver.process.wait(SOON_S)
    assert re.search(r"ws://h0:\d+ cannot be reached.* Set SPARKDL_DRIVER_HOST", driver.tail())


bed_of_ipv6 = bed_of("h0", "h1", "h2", network=IPV6)


@pytest.mark.deep
@each_way
def test_collectives_need_no_ipv4(bed_of_ipv6: Bed, way: str) -> None:
    found = trained(bed_of_ipv6, bed_of_ipv6["h0"].address, way)
    assert found == [bed_of_ipv6["h1"].address, bed_of_ipv6["h2"].address]


@pytest.mark.deep
@pytest.mark.parametrize("by", ["address", pytest.param("name", marks=pytest.mark.smoke)])
def test_hosts_may_have_ipv6_alone(bed_of_ipv6: Bed, by: str) -> None:
    bed = bed_of_ipv6
    found = trained(bed, str(getattr(bed["h0"], by)))
    assert found == [bed["h1"].address, bed["h2"].address]


@pytest.mark.deep
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_spark_and_sparkdl_need_no_ipv4(bed_of_ipv6: Bed) -> None:
    bed = bed_of_ipv6
    url = bed.start_spark("h0", {"h1": 2, "h2": 2})
    program = (sys.executable, "-m", "tests.hosts.train", url, str(SHARED))
    driver = bed["h0"].run(*program, "--rows=400", "--pause=0", "--fault-within=0")
    nodes = driver.wait_for("checkpoint", SPARK_S)["nodes"]
    assert sorted(nodes.values()) == [bed["h1"].address, bed["h2"].address]
    trained = driver.wait_for("trained", SPARK_S)
    assert (trained["lost"], trained["doubled"]) == (0, 0)
    driver.wait_for("shut down")
