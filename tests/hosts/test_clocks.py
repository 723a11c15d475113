"""The clocks of the nodes' hosts are ten minutes slow and fast: nothing depends on them.

Clocks of hosts that share a kernel cannot differ. What Python code of the nodes reads is shifted
instead, in agents and children; what C++ code reads (Arrow, gRPC, PyTorch) is not.
"""

from __future__ import annotations

import sys
import time

import pytest

from tests.hosts.bed import SHARED, Bed, Host
from tests.hosts.collective import ROWS
from tests.hosts.test_collectives import ENDED_S, RESTARTS, lose, started

CLOCK = """
import datetime, os, time

SHIFT_S = float(os.environ["CLOCK_SHIFT_S"])
real, real_ns = time.time, time.time_ns
time.time = lambda: real() + SHIFT_S
time.time_ns = lambda: real_ns() + int(SHIFT_S * 1e9)


class Shifted(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(time.time(), tz)


datetime.datetime = Shifted
"""


def clock_of(host: Host, *environment: str) -> float:
    """Return by how many seconds the clock of Python programs there is fast."""
    code = 'import json, time; print(json.dumps({"event": "clock", "now_s": time.time()}))'
    command = f"{' '.join(environment)} exec {sys.executable} -c '{code}'"
    return float(host.run("sh", "-c", command).wait_for("clock")["now_s"]) - time.time()


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lost", [0, 1])
def test_clocks_of_hosts_need_not_agree(bed: Bed, lost: int) -> None:
    """Rows are fed, checkpoints made, a host is lost, and its node is the root cause."""
    folder = bed.folder / "shared" / "clock"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(CLOCK)
    path = f"PYTHONPATH={SHARED}/clock:$PYTHONPATH"
    clocks = {"h1": ["CLOCK_SHIFT_S=-600", path], "h2": ["CLOCK_SHIFT_S=600", path]}
    assert [round(clock_of(bed[name], *clocks[name]) / 600) for name in clocks] == [-1, 1]
    driver = started(bed, "plain", RESTARTS, "--fed", environments=clocks)
    gone, left = lose(bed, driver, lost, Host.lose_what_comes)
    assert driver.wait_for("again", ENDED_S)["hosts"] == [left.address]
    assert driver.wait_for("trained", ENDED_S)["total"] == ROWS
    assert f"{gone.address} was lost" in driver.tail(400)
    driver.wait_for("shut down", ENDED_S)
