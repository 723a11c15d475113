"""Nodes that agree on something through the driver."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import sparkdl
from sparkdl.core.errors import NodeFailedError
from sparkdl.core.options import Feeding, Roles
from sparkdl.node.context import NodeContext, current
from tests.doubles.nodes import SOON_S, launch


def gather(args: None, ctx: NodeContext) -> list[Any]:
    assert current() is ctx
    if not ctx.member.role.is_trainer:
        with pytest.raises(sparkdl.errors.ConfigError, match="evaluator:0 does not train"):
            ctx.barrier()
        return []
    with pytest.raises(sparkdl.errors.ConfigError, match="cannot send this value"):
        ctx.all_gather(object())
    ctx.barrier()
    everyone = ctx.all_gather({"rank": ctx.rank, "array": np.full(2, ctx.rank, np.float16)})
    if ctx.restarts == 0 and ctx.rank == 0:
        with pytest.raises(sparkdl.errors.CoordinationError, match=r"within 0.05 s; .* call 3 of"):
            ctx.barrier(0.05)
        raise OSError("a first try that fails")
    if ctx.restarts == 0:
        threading.Event().wait(SOON_S)
    return [ctx.all_gather(n * ctx.rank) for n in range(50)] + [everyone]


def test_all_nodes_have_the_values_of_all_also_after_a_restart() -> None:
    assert current() is None
    with launch(
        gather, nodes=3, max_restarts=1, roles=Roles(evaluator=True), feeding=Feeding(fed=False)
    ) as cluster:
        results = cluster.results(6 * SOON_S)
    for found in results[:2]:
        assert found[:-1] == [[0, n] for n in range(50)]
        assert [(one["rank"], one["array"].tolist()) for one in found[-1]] == [
            (rank, [rank, rank]) for rank in range(2)
        ]


def leave_early(args: None, ctx: NodeContext) -> None:
    if ctx.rank == 0:
        ctx.barrier()


def test_node_that_returned_without_calling_fails_who_waits_for_it() -> None:
    with pytest.raises(NodeFailedError, match="worker:1 returned from map_fun without it"):
        sparkdl.run(None, leave_early, nodes=2, framework="plain", executor="local")
