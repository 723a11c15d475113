"""Who gives up first when nothing comes any more."""

from __future__ import annotations

import pytest

from sparkdl.control.lease import SILENT_LOOKS, agent_keep_alive, driver_keep_alive, look_s
from sparkdl.core.options import MIN_HOST_TIMEOUT_S


@pytest.mark.parametrize("lease_s", [0.5, 2.0, 20.0, 600.0])
@pytest.mark.parametrize("host_timeout_s", [MIN_HOST_TIMEOUT_S, 8.0, 60.0])
def test_agent_has_ended_its_child_before_the_driver_gives_its_place_away(
    lease_s: float, host_timeout_s: float
) -> None:
    agent = agent_keep_alive(lease_s, host_timeout_s)
    driver = driver_keep_alive(lease_s, host_timeout_s)
    assert lease_s < agent.ping_timeout
    assert agent.longest_s < driver.ping_timeout
    assert look_s(lease_s) * SILENT_LOOKS < driver.ping_timeout
    # A ping of the agent begins its count; what came last before the cut, the driver's.
    assert agent.ping_interval + agent.host_timeout < driver.host_timeout - 1.0
