"""Who gives up first when a link carries nothing, in either direction, and that nobody does early.

The two ends of one control connection run on two hosts; see `tests/hosts/ends.py`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest
from _pytest.mark.structures import ParameterSet

from tests.hosts.bed import Bed, Host, Program

HOST_TIMEOUT_S = 4.0
SOON_S = 30.0
NEVER = threading.Event()
SERVERS = ("server", "talking", "talking-tls")
pytestmark = pytest.mark.deep  # they wait: `make test-hosts` runs them


def ends(bed: Bed, server: str) -> tuple[Program, Program]:
    """Start the two ends: the server on h0, the client on h1."""
    program = (sys.executable, "-m", "tests.hosts.ends")
    timeout = str(HOST_TIMEOUT_S)
    there = bed["h0"].run(*program, server, bed["h0"].address, timeout)
    listening = there.wait_for("listening", SOON_S)
    here = bed["h1"].run(*program, "client", listening["url"], timeout, listening["roots"])
    there.wait_for("joined", SOON_S)
    return there, here


def every_pair(*first: object, smoke: tuple[object, str]) -> list[ParameterSet]:
    """All of these with all servers; one of them is a smoke test."""
    pairs = ((one, server) for one in first for server in SERVERS)
    return [pytest.param(*p, marks=pytest.mark.smoke if p == smoke else ()) for p in pairs]


@pytest.mark.parametrize(
    ("lose", "server"),
    every_pair(*(Host.cut, Host.lose_what_comes, Host.lose_what_goes), smoke=(Host.cut, "talking")),
)
def test_agent_gives_up_before_driver(bed: Bed, lose: Callable[[Host], None], server: str) -> None:
    there, here = ends(bed, server)
    lose(bed["h1"])
    ended, left = here.wait_for("ended", SOON_S), there.wait_for("left", SOON_S)
    assert ended["reason"].startswith("the driver's host has not answered")
    assert left["reason"] == "client has not answered for 4 s"
    assert ended["at_s"] < left["at_s"]


def is_joined(there: Program, here: Program) -> bool:
    return here.process.poll() is None and "left" not in {e["event"] for e in there.events()}


@pytest.mark.parametrize(("end", "server"), every_pair("h0", "h1", smoke=("h1", "talking")))
def test_host_whose_processes_stand_still_is_there(bed: Bed, end: str, server: str) -> None:
    """For much longer than the timeout: its kernel answers."""
    there, here = ends(bed, server)
    bed[end].pause()
    NEVER.wait(2 * HOST_TIMEOUT_S)
    bed[end].resume()
    NEVER.wait(HOST_TIMEOUT_S)
    assert is_joined(there, here), there.tail()


def test_brief_cut_harms_nobody(bed: Bed) -> None:
    there, here = ends(bed, "talking")
    bed["h1"].cut()
    NEVER.wait(HOST_TIMEOUT_S / 4)
    bed["h1"].mend()
    NEVER.wait(2 * HOST_TIMEOUT_S)
    assert is_joined(there, here), there.tail()
