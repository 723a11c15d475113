"""The network between the driver and a node is cut for good: two children for one node never train.

The agent cannot ask anybody, and ends its child; the driver cannot know, and waits for longer.
"""

from __future__ import annotations

import signal
import threading
import time

import psutil
import pytest

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import NodeLostError
from sparkdl.driver.lifecycle.state import Running
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import SOON_S, launch, processes
from tests.faults.conftest import Network


def hang_at_first(args: None, ctx: NodeContext) -> int:
    if ctx.generation == 0:
        signal.pause()
    return ctx.generation


def test_longer_cut_ends_the_child_before_its_seat_is_given_away(
    network_of_node_1: Network,
) -> None:
    network_of_node_1.lease(1.0)
    with (
        pytest.raises(NodeLostError, match=r"worker:1 \(rank 1") as caught,
        launch(hang_at_first) as cluster,
    ):
        child = psutil.Process(processes()["worker:1"].child.pid)
        gone_s: list[float] = []

        def watch() -> None:
            child.wait(2 * SOON_S)
            gone_s.append(time.monotonic())

        watcher = threading.Thread(target=watch)
        watcher.start()
        network_of_node_1.cut()
        has_lost = cluster._controller.wait_for(
            lambda view: not isinstance(view.state, Running), Deadline.after(2 * SOON_S)
        )
        lost_s = time.monotonic()
        watcher.join()
        assert has_lost
        assert gone_s[0] < lost_s
        cluster.wait(SOON_S)
    assert "nothing came from it" in caught.value.root_cause.message
