"""TensorFlowOnSpark's contract for `TFCluster`, without Spark.

https://github.com/yahoo/TensorFlowOnSpark/blob/v2.2.5/tensorflowonspark/TFCluster.py
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest

from sparkdl.core import errors
from sparkdl.core.errors import ConfigError, FeedTimeoutError, LaunchError, NodeFailedError
from sparkdl.core.options import Startup
from sparkdl.node.context import NodeContext
from sparkdl.tfos import TFCluster
from sparkdl.tfos.reservation import TOKEN_VARIABLE, Client
from tests.doubles.map_funs import count_rows, double, hang
from tests.doubles.nodes import SOON_S, processes

SPARK, TENSORFLOW = TFCluster.InputMode.SPARK, TFCluster.InputMode.TENSORFLOW

Run = Callable[..., TFCluster.TFCluster]


@pytest.fixture
def run() -> Iterator[Run]:
    """`TFCluster.run` on this machine, with the plain framework; what runs is ended after."""
    with ExitStack() as stack:

        def start(
            map_fun: Any, tf_args: Any = None, num_executors: int = 1, num_ps: int = 0, **more: Any
        ) -> TFCluster.TFCluster:
            options = {"executor": "local", "framework": "plain", **more}
            sc: Any = None
            cluster = TFCluster.run(sc, map_fun, tf_args, num_executors, num_ps, **options)
            stack.callback(cluster.cluster.abort)
            stack.callback(cluster.server.stop)
            return cluster

        yield start


def test_cluster_that_reads_its_own_data_tells_each_node_and_takes_no_rows(run: Run) -> None:
    cluster = run(hang, None, 4, 1, master_node="chief", eval_node=True)
    assert [
        (info["executor_id"], info["job_name"], info["task_index"]) for info in cluster.cluster_info
    ] == [(0, "ps", 0), (1, "chief", 0), (2, "evaluator", 0), (3, "worker", 0)]
    assert {info["host"] for info in cluster.cluster_info} == {"127.0.0.1"}
    assert len({info["port"] for info in cluster.cluster_info}) == 4
    assert cluster.input_mode is TENSORFLOW
    assert cluster.queues == ["input", "output", "error"]
    assert cluster.cluster.spec.num_gpus is None
    for feed in (cluster.train, cluster.inference):
        with pytest.raises(ConfigError, match=r"need TFCluster\.run"):
            feed([1])
    with pytest.raises(errors.ShutdownTimeoutError, match="chief:0, worker:0 had not returned"):
        cluster.shutdown(timeout=1)
    assert not processes()


def test_cluster_that_is_fed_tells_what_it_was_made_of_and_takes_rows(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(args: Any, ctx: NodeContext) -> list[int]:
        return [0, 0] if ctx.job_name == "ps" else count_rows(args, ctx)

    monkeypatch.setenv(TOKEN_VARIABLE, "a secret that both know")
    options = {"master_node": "master", "release_port": False}
    queues = ["input", "extra", "error"]
    cluster = run(count, Namespace(num_gpus=0), 3, 1, input_mode=1, queues=queues, **options)
    meta = {
        "id": cluster.cluster_id,
        "cluster_template": {"ps": [0], "master": [1], "worker": [2]},
        "num_executors": 3,
        "default_fs": "file://",
        "working_dir": os.getcwd(),
        "server_addr": cluster.server.address,
        "release_port": False,
    }
    assert cluster.meta == cluster.cluster_meta == meta
    told = (cluster.defaultFS, cluster.working_dir, cluster.num_executors)
    assert told == ("file://", os.getcwd(), 3)
    assert cluster.input_mode is SPARK
    assert cluster.cluster.spec.num_gpus == 0
    fed = [bool(info["addr"]) for info in cluster.cluster_info]
    assert fed == [False, True, True]
    assert {(info["tb_port"], info["tb_pid"]) for info in cluster.cluster_info} == {(0, 0)}
    assert {info["authkey"] for info in cluster.cluster_info} == {b""}, "no key is handed out"
    assert cluster.tensorboard_url() is None
    check_that_wrong_feeds_are_refused(cluster)
    cluster.train(range(100), 3)
    cluster.train(range(100))  # ten times
    check_that_clients_see_the_nodes_and_ask_for_the_end(cluster)
    before = signal.getsignal(signal.SIGALRM)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(cluster.shutdown, grace_secs=SOON_S).result()
    assert signal.getsignal(signal.SIGALRM) is before
    assert sum(rows for rows, _total in cluster.cluster.results()) == 1300
    with pytest.raises(LaunchError, match="did not answer"):
        Client(cluster.cluster_meta["server_addr"])


def test_queues_and_timeouts_mean_what_they_are_called(run: Run) -> None:
    def read_extra(args: Any, ctx: NodeContext) -> int:
        feed, rows = ctx.get_data_feed(qname_in="extra"), 0
        while not feed.should_stop():
            rows += len(feed.next_batch(4))
        return rows

    cluster = run(
        read_extra, None, 1, input_mode=SPARK, queues=["input", "extra"], reservation_timeout=77
    )
    assert cluster.cluster.spec.settings.start_timeout_s == 77
    cluster.train(range(30), 2, qname="extra")
    with pytest.raises(FeedTimeoutError, match=r"feed 'input'.* 0\.5 s"):
        cluster.train(range(30), 1, feed_timeout=0.5)  # which nobody reads
    cluster.shutdown()
    assert sum(cluster.cluster.results()) == 60


def check_that_wrong_feeds_are_refused(cluster: TFCluster.TFCluster) -> None:
    with pytest.raises(ConfigError, match="num_epochs=-1 must be 0 or more"):
        cluster.train([1], -1)
    for name in ("unknown", "error"):
        with pytest.raises(ConfigError, match=f"qname='{name}' is not one of queues="):
            cluster.train([1], 1, qname=name)
        with pytest.raises(ConfigError, match=f"qname='{name}' is not one of queues="):
            cluster.inference([1], qname=name)


def check_that_clients_see_the_nodes_and_ask_for_the_end(cluster: TFCluster.TFCluster) -> None:
    assert cluster.cluster_meta["server_addr"][0] == "127.0.0.1"
    with closing(Client(cluster.cluster_meta["server_addr"])) as client:
        assert client.await_reservations(SOON_S) == cluster.cluster_info
        assert not cluster.server.done
        assert client.request_stop() == "OK"
    assert cluster.server.done


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"eval_node": True, "input_mode": SPARK, "num_executors": 2}, "eval_node=True needs"),
        ({"num_executors": 1, "num_ps": 1}, "do not leave room for a worker"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    run: Run, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        run(hang, **options)
    assert not processes()


def test_shutdown_raises_what_a_node_raised_once_and_the_next_run_is_not_spoilt(run: Run) -> None:
    def fail(args: None, ctx: NodeContext) -> None:
        ctx.get_data_feed().next_batch(1)
        raise ValueError("no such layer")

    cluster = run(fail, input_mode=SPARK)
    with pytest.raises(NodeFailedError, match="no such layer"):
        cluster.train(range(10), 1)
    with pytest.raises(NodeFailedError, match="no such layer"):
        cluster.shutdown()
    cluster.shutdown()
    check_that_command_lines_and_old_names_are_there(run)
    assert not processes()


@pytest.mark.parametrize("input_mode", list(TFCluster.InputMode))
def test_shutdown_awaits_training_at_any_grace(run: Run, input_mode: TFCluster.InputMode) -> None:
    def export(args: Any, ctx: NodeContext) -> str:
        if args[0] is SPARK:
            assert len(ctx.get_data_feed().next_batch(100)) == 20
        threading.Event().wait(1.0)
        return "exported"

    cluster = run(export, [input_mode], 1, input_mode=input_mode)
    if input_mode is SPARK:
        cluster.train(range(20), 1)
    cluster.shutdown(grace_secs=0.1)
    assert cluster.cluster.results() == ["exported"]


def check_that_command_lines_and_old_names_are_there(run: Run) -> None:
    def look(args: Any, ctx: NodeContext) -> list[Any]:
        assert args is sys.argv
        names = ("executor_id", "worker_num", "job_name", "task_index", "num_workers", "defaultFS")
        return [*sys.argv, *(getattr(ctx, name) for name in names), ctx.tmp_socket is None]

    cluster = run(look, ["mnist.py", "--steps", "9"], release_port=False)
    cluster.shutdown(timeout=-1)  # without a limit
    assert cluster.cluster.results() == [
        ["mnist.py", "--steps", "9", 0, 0, "worker", 0, 1, "file://", False]
    ]


def test_inference_gives_one_result_per_row_in_order_and_the_block_shuts_down(run: Run) -> None:
    with run(double, None, 2, input_mode=SPARK, startup=Startup(tls=True)) as cluster:
        assert all(info["addr"].startswith("grpc+tls://") for info in cluster.cluster_info)
        address = cluster.cluster_meta["server_addr"]
        with closing(Client(address)) as client:
            assert client.get_reservations() == cluster.cluster_info
        assert list(cluster.inference(range(500))) == [2 * i for i in range(500)]
    assert not processes()
