"""Who gives up first when nothing comes any more, and that a short cut has nobody give up."""

from __future__ import annotations

import pytest

from sparkdl.control.lease import (
    SILENT_LOOKS,
    agent_keep_alive,
    driver_keep_alive,
    driver_patience_s,
    look_s,
)

LEASES_S = [0.5, 2.0, 20.0, 600.0]


@pytest.mark.parametrize("nodes", [1, 10_000])
@pytest.mark.parametrize("lease_s", LEASES_S)
def test_agent_has_ended_its_child_before_the_driver_gives_its_seat_away(
    lease_s: float, nodes: int
) -> None:
    # The pings of either may have been answered just before the silence began, or just after.
    agent, driver = agent_keep_alive(lease_s, nodes), driver_keep_alive(lease_s, nodes)
    assert agent.longest_s + lease_s / 4 <= driver.ping_timeout
    assert agent.longest_s + agent.ping_interval < driver_patience_s(lease_s, nodes)
    assert look_s(lease_s, nodes) * SILENT_LOOKS <= agent.longest_s


def test_thousands_of_agents_ping_more_seldom() -> None:
    assert [agent_keep_alive(20.0, n).ping_interval for n in (1, 2500, 10_000)] == [5.0, 5.0, 20.0]


@pytest.mark.parametrize("lease_s", LEASES_S)
def test_what_is_sent_in_a_cut_of_less_than_the_lease_arrives_in_time(lease_s: float) -> None:
    pause_s, arrives_s = 0.2, 0.2  # TCP_RTO_MIN of Linux
    while arrives_s < lease_s:
        pause_s *= 2
        arrives_s += pause_s
    for keep in (agent_keep_alive(lease_s), driver_keep_alive(lease_s)):
        assert arrives_s < keep.ping_timeout
