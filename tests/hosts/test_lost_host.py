"""A host is lost while rows are fed: its link is cut without a word, or its power goes.

Each test starts a standalone cluster on three hosts; see `tests/hosts/bed.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from tests.hosts.bed import SHARED, Bed, Host

LAUNCHED_S = 150.0
ENDED_S = 150.0
HOST_TIMEOUT_S = 8.0
"""The default."""

pytestmark = [pytest.mark.timeout(400), pytest.mark.spark]


@pytest.mark.parametrize("lose", [Host.cut, Host.power_off])
def test_lost_host_costs_one_generation_and_no_row(bed: Bed, lose: Callable[[Host], None]) -> None:
    url = bed.start_spark("h0", {"h1": 2, "h2": 2})
    driver = bed["h0"].run(sys.executable, "-m", "tests.hosts.train", url, str(SHARED))
    before = driver.wait_for("checkpoint", LAUNCHED_S)
    assert sorted(before["nodes"].values()) == [bed["h1"].address, bed["h2"].address]
    lose(bed["h2"])
    driver.wait_for("noticed", ENDED_S)
    assert not bed["h2"].processes("sparkdl.node.child"), "it still trains, unseen"
    assert [*driver.wait_for("again", ENDED_S)["nodes"].values()] == [bed["h1"].address]
    assert driver.wait_for("fed", ENDED_S)["rows_used"] == 4000
    trained = driver.wait_for("trained", ENDED_S)
    assert (trained["lost"], trained["doubled"]) == (0, 0)
    driver.wait_for("shut down")
    assert f"{bed['h2'].address} does not answer: not for {HOST_TIMEOUT_S:g} s" in driver.tail(400)
    assert driver.process.wait(ENDED_S) == 0
