"""Who gives up first when nothing comes any more, and that a short cut has nobody give up."""

from __future__ import annotations

import pytest

from sparkdl.control.lease import agent_keep_alive, driver_keep_alive

LEASES_S = [0.5, 2.0, 20.0, 600.0]


@pytest.mark.parametrize("lease_s", LEASES_S)
def test_agent_has_ended_its_child_before_the_driver_gives_its_seat_away(lease_s: float) -> None:
    # The pings of either may have been answered just before the silence began, or just after.
    agent, driver = agent_keep_alive(lease_s), driver_keep_alive(lease_s)
    assert agent.longest_s + lease_s / 4 <= driver.ping_timeout


@pytest.mark.parametrize("lease_s", LEASES_S)
def test_what_is_sent_in_a_cut_of_less_than_the_lease_arrives_in_time(lease_s: float) -> None:
    pause_s, arrives_s = 0.2, 0.2  # TCP_RTO_MIN of Linux
    while arrives_s < lease_s:
        pause_s *= 2
        arrives_s += pause_s
    for keep in (agent_keep_alive(lease_s), driver_keep_alive(lease_s)):
        assert arrives_s < keep.ping_timeout
