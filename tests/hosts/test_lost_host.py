"""Links are cut without a word, and hosts lose their power, while rows are fed.

Each test starts a standalone cluster on three hosts (`tests/hosts/bed.py`), and a driver program
whose model shows which rows it has seen (`tests/hosts/train.py`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest

from tests.doubles.nodes import is_alive
from tests.hosts.bed import SHARED, Bed, Host, Program

LAUNCHED_S = 150.0
ENDED_S = 150.0
SHUT_DOWN_S = 20.0
FORGOTTEN_S = 60.0
"""From the notice until all is fed: less than Spark's own timeout, and twice what it takes."""
ROWS = 4000
CHILD = "sparkdl.node.child"
NEVER = threading.Event()

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600), pytest.mark.spark]


def trained_until_checkpoint(bed: Bed, *options: str, h1: int = 2, h2: int = 2) -> Program:
    """Start the driver program on h0, and wait until its nodes on h1 and h2 have a checkpoint.

    Args:
        h1, h2: task slots there.
    """
    url = bed.start_spark("h0", {"h1": h1, "h2": h2})
    program = (sys.executable, "-m", "tests.hosts.train", url, str(SHARED))
    driver = bed["h0"].run(*program, f"--rows={ROWS}", *options)
    nodes = driver.wait_for("checkpoint", LAUNCHED_S)["nodes"]
    assert sorted(nodes.values()) == [bed["h1"].address, bed["h2"].address]
    return driver


def assert_trained(driver: Program) -> None:
    """No row is lost or doubled in the model."""
    assert driver.wait_for("fed", ENDED_S)["rows_used"] == ROWS
    trained = driver.wait_for("trained", ENDED_S)
    assert (trained["lost"], trained["doubled"]) == (0, 0)
    driver.wait_for("shut down")


def lose_h2(bed: Bed, driver: Program, lose: Callable[[Host], None]) -> None:
    """Wait until the driver has noticed; by then nothing trains on the lost host."""
    children = bed["h2"].processes(CHILD)
    lose(bed["h2"])
    driver.wait_for("noticed", ENDED_S)
    assert not any(map(is_alive, children)), "it still trains, unseen"


@pytest.mark.parametrize(
    ("lose", "rows", "options"),
    [
        pytest.param(Host.cut, "cached", "{}", marks=pytest.mark.smoke),
        (Host.power_off, "cached", "{}"),
        (Host.cut, "cached", '{"startup": {"tls": true}}'),
        (Host.cut, "here", "{}"),
        (Host.cut, "made", '{"feeding": {"global_batch_size": 20}}'),
    ],
)
def test_lost_host_costs_one_generation_and_no_row(
    bed: Bed, lose: Callable[[Host], None], rows: str, options: str
) -> None:
    """Nor does it matter that blocks of cached rows were there, or that a driver's table is fed."""
    driver = trained_until_checkpoint(bed, f"--rows-are={rows}", f"--options={options}")
    lose_h2(bed, driver, lose)
    assert {*driver.wait_for("again", ENDED_S)["nodes"].values()} == {bed["h1"].address}
    assert_trained(driver)
    noticed, fed = driver.wait_for("noticed")["at_s"], driver.wait_for("fed")["at_s"]
    assert fed - noticed < FORGOTTEN_S, "a task fetched from the lost host"
    trained, shut_down = driver.wait_for("trained")["at_s"], driver.wait_for("shut down")["at_s"]
    assert shut_down - trained < SHUT_DOWN_S, "it waited for the task on the lost host"
    assert driver.process.wait(ENDED_S) == 0
    said = driver.output.read_text(errors="replace")
    assert f"{bed['h2'].address} has not answered for 8 s" in said
    assert "did not end in time" not in said


@pytest.mark.parametrize("cut_s", [3.0, 20.0])
@pytest.mark.parametrize("host", ["h0", "h2"])
def test_host_that_comes_back_takes_part_again(bed: Bed, host: str, cut_s: float) -> None:
    """That of the driver, or of a node, cut off for less and for more than `host_timeout`."""
    driver = trained_until_checkpoint(
        bed, "--fault-within=0", '--options={"recovery": {"min_nodes": 1, "wait_s": 60}}'
    )
    bed[host].cut()
    NEVER.wait(cut_s)
    bed[host].mend()
    assert_trained(driver)


@pytest.mark.parametrize("pause_s", [pytest.param(5.0, marks=pytest.mark.smoke), 20.0, 90.0])
def test_paused_host_loses_no_row(bed: Bed, pause_s: float) -> None:
    """All its processes stand still; 90 seconds are more than the lease."""
    driver = trained_until_checkpoint(bed, "--fault-within=0")
    bed["h2"].pause()
    NEVER.wait(pause_s)
    bed["h2"].resume()
    assert_trained(driver)
    has_begun_again = "restart 1 of" in driver.tail(400)
    assert has_begun_again == (pause_s > 60.0)
