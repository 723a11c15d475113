"""Hosts with unusual names and addresses: by which of them the others reach a node.

The nodes run on two hosts, without Spark unless a test says otherwise, and are fed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.bed import IPV6, Bed, hosts, why_not
from tests.hosts.collective import ROWS
from tests.hosts.test_collectives import each_way

SOON_S = 60.0
ELSEWHERE = "10.99.0.5"
"""An address of a host to which no other one has a route."""


def trained(bed: Bed, driver_host: str, way: str = "plain") -> list[str]:
    """Train on h1 and h2, and return the addresses under which the nodes know each other."""
    nodes = json.dumps([bed[name].entering() for name in ("h1", "h2")])
    driver = bed["h0"].run_above(
        *(sys.executable, "-m", "tests.hosts.collective", way, nodes),
        *(f"--address={driver_host}", "--fed", "--pause=0"),
        STARTERS=str(bed.folder),
    )
    launched = driver.wait_for("launched", SOON_S)
    assert driver.wait_for("trained", SOON_S)["total"] == ROWS
    driver.wait_for("shut down", SOON_S)
    return [str(host) for host in launched["hosts"]]


def test_node_with_two_addresses_is_known_by_the_one_that_is_reached(bed: Bed) -> None:
    for name in ("h1", "h2"):
        bed[name].add_address(f"{ELSEWHERE}/32", "lo")
    assert trained(bed, bed["h0"].address) == [bed["h1"].address, bed["h2"].address]


def test_driver_need_not_know_the_names_of_hosts(bed: Bed) -> None:
    bed["h0"].know_only("h0")
    assert trained(bed, "h0") == [bed["h1"].address, bed["h2"].address]


@pytest.fixture
def bed_of_ipv6(tmp_path: Path) -> Iterator[Bed]:
    if reason := why_not():
        pytest.skip(reason)
    with hosts(tmp_path, "h0", "h1", "h2", network=IPV6) as made:
        yield made


@pytest.mark.deep
@each_way
def test_collectives_need_no_ipv4(bed_of_ipv6: Bed, way: str) -> None:
    found = trained(bed_of_ipv6, bed_of_ipv6["h0"].address, way)
    assert found == [bed_of_ipv6["h1"].address, bed_of_ipv6["h2"].address]


@pytest.mark.parametrize("by", ["address", "name"])
def test_hosts_may_have_ipv6_alone(bed_of_ipv6: Bed, by: str) -> None:
    bed = bed_of_ipv6
    found = trained(bed, str(getattr(bed["h0"], by)))
    assert found == [bed["h1"].address, bed["h2"].address]
