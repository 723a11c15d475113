"""A driver within one call that keeps Python's lock, in pandas for example, is busy, not lost."""

from __future__ import annotations

import ctypes
from typing import Any

from sparkdl.core.options import Recovery
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import SOON_S, launch

TIMEOUT_S = 4.0  # the least that there is


def gather(args: Any, ctx: NodeContext) -> list[int]:
    return [int(sum(ctx.all_gather(step))) for step in range(3)]


def test_driver_within_one_call_of_c_loses_nobody() -> None:
    with launch(gather, nodes=2, recovery=Recovery(host_timeout_s=TIMEOUT_S)) as cluster:
        # Called so, a function of C keeps the lock: the driver's loop answers nobody meanwhile.
        ctypes.PyDLL(None).usleep(int(1.25 * TIMEOUT_S * 1e6))
        assert cluster.results(SOON_S) == [[0, 2, 4]] * 2
