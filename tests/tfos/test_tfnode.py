"""Paths, feeds and refusals of TensorFlowOnSpark's `TFNode` and of its context, without Spark."""

from __future__ import annotations

import socket
import sys
from typing import Any

import pytest

import sparkdl
from sparkdl.core.errors import ConfigError
from sparkdl.node.context import NodeContext
from sparkdl.tfos import TFManager, TFNode, TFSparkNode, marker
from sparkdl.tfos.TFSparkNode import TFNodeContext
from tests.doubles.nodes import SOON_S, launch

FILE_SYSTEMS = ("file://", "hdfs://namenode:8020", "viewfs://cluster")


@pytest.mark.parametrize("default_fs", FILE_SYSTEMS)
@pytest.mark.parametrize(
    "url",
    ["hdfs://a/b", "file:///a", "gs://bucket/a", "abfss://c@account.dfs.core.windows.net/a",
     "wasbs://c/a", "s3a://bucket/a", "https://example.org/a"],
)  # fmt: skip
def test_path_with_a_scheme_is_left_alone_and_others_completed(default_fs: str, url: str) -> None:
    context = TFNodeContext(defaultFS=default_fs)
    assert TFNode.hdfs_path(context, url) == url
    assert TFNode.hdfs_path(context, "/a") == context.absolute_path("/a") == f"{default_fs}/a"


def test_context_of_a_test_has_what_programs_use() -> None:
    spec = {"ps": ["a:1"], "chief": ["a:2"], "evaluator": ["b:1"], "worker": ["b:2", "b:3"]}
    with socket.socket() as port:
        ctx = TFNodeContext(3, "worker", 0, spec, "hdfs://n", "/work", None, port)
        assert (ctx.executor_id, ctx.worker_num) == (3, 3)
        assert (ctx.job_name, ctx.task_index) == ("worker", 0)
        assert (ctx.cluster_spec, ctx.num_workers) == (spec, 3)
        TFNode.release_port(ctx)
        assert ctx.tmp_socket is None
        assert port.fileno() == -1
    ctx.release_port()
    with pytest.raises(ConfigError, match=r"TFManager\.start"):
        ctx.get_data_feed()


def manager(*rows: Any) -> TFManager.TFManager:
    mgr = TFManager.start(b"abc", ["input", "output"], "local")
    for row in rows:
        mgr.get_queue("input").put(row)
    return mgr


def test_training_batches_run_across_partitions_up_to_the_end() -> None:
    mgr = manager(0, 1, 2, marker.EndPartition(), 3, 4, None)
    feed = TFNode.DataFeed(mgr)
    assert not feed.should_stop()
    assert [feed.next_batch(2) for _ in range(3)] == [[0, 1], [2, 3], [4]]
    assert feed.should_stop()
    assert feed.done_feeding
    assert feed.next_batch(2) == []


def test_inference_batches_end_with_their_partition_and_results_are_queued() -> None:
    mgr = manager(0, 1, 2, marker.EndPartition(), 3, None)
    feed = TFNodeContext(mgr=mgr).get_data_feed(train_mode=False)
    while not feed.should_stop():
        feed.batch_results([2 * row for row in feed.next_batch(2)])
    results = mgr.get_queue("output")
    assert [results.get_nowait() for _ in range(4)] == [0, 2, 4, 6]


def test_terminate_empties_the_queue_at_once() -> None:
    mgr = manager(*range(100))
    TFNode.DataFeed(mgr).terminate()
    assert mgr.get_queue("input").empty()
    assert mgr.get("state") == "terminating"


def test_manager_keeps_values_and_knows_its_queues() -> None:
    mgr = manager()
    assert (mgr.get("state"), mgr.get("other")) == ("running", None)
    mgr.set("other", 1)
    assert mgr.get("other") == 1
    with pytest.raises(ConfigError, match=r"no queue 'extra'; choose one of \['input', 'output'\]"):
        mgr.get_queue("extra")


def test_node_has_what_a_test_has_and_reads_what_the_cluster_feeds_over_its_manager() -> None:
    def read(args: list[str], ctx: NodeContext) -> list[Any]:
        from sparkdl.tfos import TFNode

        missing = [name for name in args if not hasattr(ctx, name)]
        ctx.mgr.set("mine", ctx.rank)
        feed = TFNode.DataFeed(ctx.mgr, True, "input")
        rows = []
        while not feed.should_stop():
            rows += feed.next_batch(7)
        try:
            ctx.mgr.get_queue("input")
        except sparkdl.errors.RemovedError as error:
            return [missing, sorted(rows), ctx.mgr.get("mine"), ctx.mgr.get("state"), str(error)]
        return rows

    wanted = [name for name in dir(TFNodeContext()) if not name.startswith("_")]
    assert {"mgr", "tmp_socket", "start_cluster_server", "defaultFS"} <= set(wanted)
    assert TFSparkNode.__all__ == ["TFNodeContext"]
    argv = list(sys.argv)
    with launch(read, wanted, nodes=1) as cluster:
        cluster.feed(range(50))
        ((missing, rows, mine, state, error),) = cluster.results(SOON_S)
    assert (missing, rows, mine, state) == ([], list(range(50)), 0, "running")
    assert "ctx.get_data_feed(qname_in='input')" in error
    assert sys.argv == argv
