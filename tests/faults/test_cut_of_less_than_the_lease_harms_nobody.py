"""The network between the driver and a node is cut, and mended within the lease."""

from __future__ import annotations

import signal

from sparkdl.core.deadline import Deadline
from sparkdl.driver.options import Observe
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import SOON_S, Lines, launch
from tests.faults.conftest import Network


def wait_for_a_signal(args: None, ctx: NodeContext) -> int:
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    print("in map_fun", flush=True)
    signal.sigwait({signal.SIGUSR2})
    return ctx.generation


def test_cut_of_less_than_the_lease_harms_nobody(network_of_node_1: Network) -> None:
    from tests.doubles.nodes import processes

    network_of_node_1.lease(1.0)
    lines = Lines()
    with launch(wait_for_a_signal, observe=Observe(on_log=lines)) as cluster:
        lines.wait_for("in map_fun", 2)
        network_of_node_1.cut()
        cluster._controller.wait_for(lambda view: False, Deadline.after(0.9))
        network_of_node_1.mend()
        for node in processes().values():
            node.child.send_signal(signal.SIGUSR2)
        assert cluster.results(SOON_S) == [0, 0]
