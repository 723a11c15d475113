"""`launch` and `run`: what they refuse, what they return, and ports that are lost on the way."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

import sparkdl
from sparkdl.core.errors import ConfigError
from sparkdl.core.options import Recovery, Roles
from sparkdl.driver.options import Observe
from sparkdl.node.context import NodeContext
from tests.doubles.frameworks import LOSES_PORTS
from tests.doubles.map_funs import hang
from tests.doubles.nodes import SOON_S, processes

LOCAL: dict[str, Any] = {"framework": "plain", "executor": "local"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"framework": "theano"}, r"framework='theano' is not known; choose one of .*module:Class"),
        ({"framework": "tensorflw"}, r"did you mean 'tensorflow'\?"),
        ({"checkpoint_dir": "s4://b/c"}, r"agents cannot read s4://. They read local"),
        ({"checkpoint_dir": ""}, "checkpoint_dir=''"),
        ({"checkpoint_dir": "/dev/null/inside"}, "cannot be written"),
        ({"observe": Observe(record="")}, "give the path of a folder"),
        ({"observe": Observe(record="hdfs://host/logs")}, "is a URL"),
        ({"observe": Observe(record="/proc/logs")}, "cannot be written to on the driver's machine"),
        ({"map_fun": lambda args: None}, r"called as <lambda>\(args, ctx\), and <lambda>\(args\)"),
        ({"executor": "yarn"}, "executor='yarn': choose 'spark' or 'local'"),
        ({"framework": "no.such.module:Class"}, "cannot be imported: No module named 'no'"),
        ({"framework": "sparkdl.core.spec:NoSuch"}, "cannot be imported: .*NoSuch"),
        ({"framework": "sparkdl.core.spec:Role"}, "must be a subclass of sparkdl.frameworks"),
        ({"feeding": None}, r"feeding=None must be a sparkdl.Feeding: feeding=Feeding\(fed, "),
        ({"roles": Roles(ps=2)}, "do not leave room for a worker"),
        ({"recovery": Recovery(min_nodes=3)}, r"min_nodes=3\) must be at most the 2 nodes"),
        ({"args": threading.Lock()}, "pickle.*'args'"),
        ({"map_fun": "train"}, "map_fun must be a function"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    options: dict[str, Any], text: str
) -> None:
    options = {"map_fun": hang, "nodes": 2, **LOCAL, **options}
    with pytest.raises(ConfigError, match=text):
        sparkdl.launch(None, **options)
    assert not processes()


def test_run_returns_the_values_by_rank_warns_of_sys_exit_and_leaves_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def place(args: str, ctx: NodeContext) -> list[Any]:
        if ctx.rank == 2:
            raise SystemExit(0)
        return [args, ctx.rank, ctx.local_rank, ctx.num_workers, ctx.is_chief, ctx.cluster_spec]

    first, second, third = sparkdl.run(None, place, "hello", nodes=3, **LOCAL)
    assert first[:5] == ["hello", 0, 0, 3, True]
    assert second[:5] == ["hello", 1, 1, 3, False]
    assert first[5] == second[5]
    assert len(set(first[5]["worker"])) == 3
    assert third is None
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "worker:2 called sys.exit(0) instead of returning" in warning
    assert not processes()


def test_run_that_takes_too_long_stops_the_nodes() -> None:
    with pytest.raises(TimeoutError, match="worker:0 still in map_fun"):
        sparkdl.run(None, hang, nodes=1, timeout_s=0.2, **LOCAL)
    assert not processes()


def test_round_that_lost_a_port_is_repeated_on_others_unseen_by_the_user() -> None:
    def lose_once(args: None, ctx: NodeContext) -> tuple[int, int]:
        if ctx.generation == 0 and ctx.rank == 1:
            raise OSError("address already in use")
        if ctx.generation == 0:
            hang(args, ctx)  # as collectives do when a peer is missing
        return ctx.generation, ctx.member.port

    options = {**LOCAL, "framework": LOSES_PORTS}
    results = sparkdl.run(None, lose_once, nodes=2, timeout_s=3 * SOON_S, **options)
    assert [generation for generation, _port in results] == [1, 1]
