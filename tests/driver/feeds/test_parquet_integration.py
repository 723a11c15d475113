"""Parquet files on their way into a whole cluster, read by the nodes; one test with Spark."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sparkdl
from sparkdl.core.errors import ConfigError, FeedTimeoutError, NodeFailedError, ReadError
from sparkdl.feed.parquet.source import list_files
from sparkdl.node.context import NodeContext
from sparkdl.tfos import TFCluster
from tests.doubles.frameworks import LOSES_PORTS
from tests.doubles.gates import Gate
from tests.doubles.map_funs import hang
from tests.doubles.nodes import SOON_S, launch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LITTLE = 1 << 16
"""Bytes of feed memory that make reading wait."""


def write(folder: Path, files: int = 4, rows: int = 250, width: int = 1, start: int = 0) -> Path:
    """Write files whose column "x" counts, with float32 `[width]` beside it; three row groups."""
    folder.mkdir(exist_ok=True)
    for file in range(files):
        first = start + file * rows
        filler = pa.array(np.zeros(rows * width, np.float32))
        table = pa.table(
            {
                "x": np.arange(first, first + rows),
                "wide": pa.FixedSizeListArray.from_arrays(filler, width),
            }
        )
        pq.write_table(table, folder / f"part-{file}.parquet", row_group_size=rows // 3 + 1)
    return folder


def read_epochs(args: int, ctx: NodeContext) -> list[list[int]]:
    """Read so many epochs of the feed; return column "x" of each."""
    batches = ctx.batches(16, columns=["x"], even=True)
    return [[x for batch in batches for x in batch["x"].tolist()] for _ in range(args)]


def read_all(args: Any, ctx: NodeContext) -> list[int]:
    """Read the feed to its end; return column "x"."""
    feed, found = ctx.get_data_feed(input_mapping={"x": "x"}), []
    while not feed.should_stop():
        found += [int(x) for x in feed.next_batch(16).get("x", [])]
    return found


def each_once(results: list[list[list[int]]], rows: int) -> bool:
    """Whether in each epoch each row came to one node, once."""
    return all(
        Counter(x for node in epoch for x in node) == Counter(range(rows))
        for epoch in zip(*results, strict=True)
    )


# fed by the driver's plan


def test_every_row_is_read_once_an_epoch_and_the_files_once(tmp_path: Path) -> None:
    folder = write(tmp_path / "data")
    with launch(read_epochs, 3) as cluster:
        report = cluster.feed(f"{folder}/*.parquet", epochs=3)
        assert (report.epochs, report.passes) == (3, 1)
        assert report.rows == {"worker:0": 1500, "worker:1": 1500}
        assert (report.rows_used, report.rows_unused) == (3000, 0)
        results = cluster.results(SOON_S)
    assert each_once(results, 1000)


def test_nodes_differ_by_one_row_at_most(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", files=3, rows=67)
    with launch(read_epochs, 1, nodes=2) as cluster:
        rows = cluster.feed(folder).rows
        assert sorted(rows.values()) == [100, 101]
        cluster.results(SOON_S)


def test_files_that_do_not_fit_are_read_for_each_epoch(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", rows=300, width=200)  # 1 MB
    with launch(read_epochs, 2, feed_memory=LITTLE, feed_disk=0) as cluster:
        report = cluster.feed(folder, epochs=2)
        assert (report.epochs, report.passes) == (2, 2)
        results = cluster.results(SOON_S)
    assert each_once(results, 1200)


def test_what_memory_cannot_hold_is_read_again_from_disk(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", rows=300, width=200)
    with launch(read_epochs, 2, feed_memory=LITTLE, feed_disk=1 << 24) as cluster:
        assert cluster.feed(folder, epochs=2).passes == 1
        assert each_once(cluster.results(SOON_S), 1200)


def test_files_may_be_named_in_every_way(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", files=2)
    files = sorted(folder.iterdir())
    with launch(read_all, nodes=1) as cluster:
        for data in (
            str(folder),
            files,
            [str(files[0]), str(files[1])],
            sparkdl.parquet(folder, columns=["x"]),
            list_files(str(folder), ["x"]),
        ):
            assert cluster.feed(data).rows_fed == 500
        assert Counter(cluster.results(SOON_S)[0]) == Counter([*range(500)] * 5)


def test_paths_that_name_nothing_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    with launch(read_all, nodes=1) as cluster:
        with pytest.raises(ConfigError, match="no Parquet file found"):
            cluster.feed(tmp_path / "nothing.parquet")
        with pytest.raises(ConfigError, match="must be a list of names"):
            cluster.feed(sparkdl.parquet(tmp_path, columns="x"))
        assert cluster.results(SOON_S) == [[]]


def test_vanished_file_is_an_error_that_names_node_and_file_and_ends_only_this_feed(
    tmp_path: Path,
) -> None:
    good, bad = write(tmp_path / "good"), write(tmp_path / "bad", start=5000)
    source = list_files(str(bad))
    (bad / "part-3.parquet").unlink()
    with launch(read_all) as cluster:
        with pytest.raises(ReadError, match=r"worker:1 could not read its share: .*part-3.parquet"):
            cluster.feed(source, epochs=2)
        assert cluster.feed(good, epochs=2).epochs == 2
        results = cluster.results(SOON_S)
    fed = Counter(x for node in results for x in node if x < 5000)
    assert fed == Counter([*range(1000)] * 2)


def test_terminate_ends_the_reading(tmp_path: Path) -> None:
    def first_rows(args: None, ctx: NodeContext) -> list[int]:
        feed = ctx.get_data_feed()
        if ctx.rank == 0:
            feed.next_batch(10)
            feed.terminate()
        return read_all(args, ctx)

    folder = write(tmp_path / "data", rows=300, width=200)
    more = write(tmp_path / "more", files=1, rows=20, start=5000)
    with launch(first_rows, feed_memory=LITTLE, feed_disk=0) as cluster:
        report = cluster.feed(folder, epochs=50)
        assert report.epochs == 0
        assert cluster.feed(more, epochs=2).epochs == 2
        results = cluster.results(SOON_S)
    fed = Counter(x for node in results for x in node if x >= 5000)
    assert fed == Counter([*range(5000, 5020)] * 2)


def test_share_of_a_node_that_has_returned_goes_to_the_others_in_the_next_pass(
    tmp_path: Path,
) -> None:
    def leave_early(args: None, ctx: NodeContext) -> list[int]:
        if ctx.rank == 1:
            batch = ctx.get_data_feed(input_mapping={"x": "x"}).next_batch(10)
            return [int(x) for x in batch["x"]]
        return read_all(args, ctx)

    folder = write(tmp_path / "data", rows=300, width=200)
    with launch(leave_early, feed_memory=LITTLE, feed_disk=0) as cluster:
        report = cluster.feed(folder, epochs=2)
        kept, left = cluster.results(SOON_S)
    assert (report.epochs, report.passes) == (2, 2)
    assert len(left) == 10
    assert Counter(kept) == Counter([*range(600), *range(1200)])
    assert report.rows_unused == 590


def test_feed_that_nobody_reads_times_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", rows=300, width=200)
    with launch(hang, nodes=1, feed_memory=LITTLE, feed_disk=0) as cluster:
        with pytest.raises(FeedTimeoutError, match="worker:0 has read 0 rows"):
            cluster.feed(folder, timeout_s=2)
        cluster.abort()


def test_files_are_read_anew_when_a_node_loses_its_port(tmp_path: Path) -> None:
    def lose_port_once(args: Gate, ctx: NodeContext) -> list[int]:
        if ctx.generation == 0 and ctx.rank == 1:
            ctx.get_data_feed().next_batch(10)
            args.wait()
            raise OSError("address already in use")
        return read_all(args, ctx)

    folder, gate = write(tmp_path / "data", rows=300, width=200), Gate.at(tmp_path / "gate")
    with (
        launch(
            lose_port_once, gate, framework=LOSES_PORTS, feed_memory=LITTLE, feed_disk=0
        ) as cluster,
        ThreadPoolExecutor(1) as pool,
    ):
        feeding = pool.submit(cluster.feed, folder)
        gate.open()
        assert feeding.result(2 * SOON_S).rows_fed == 1200
        results = cluster.results(SOON_S)
    assert Counter(x for node in results for x in node) == Counter(range(1200))


@pytest.mark.spark
def test_tf_cluster_trains_from_files_on_spark(tmp_path: Path, spark_cluster: SparkSession) -> None:
    folder = write(tmp_path / "data")
    cluster = TFCluster.run(
        spark_cluster.sparkContext,
        read_epochs,
        2,
        2,
        input_mode=TFCluster.InputMode.SPARK,
        framework="plain",
    )
    with cluster:
        with pytest.raises(ConfigError, match="qname='other'"):
            cluster.train(folder, qname="other")
        cluster.train(f"{folder}/*.parquet", num_epochs=2)
        assert each_once(cluster.cluster.results(2 * SOON_S), 1000)


# asked for by user code


@pytest.mark.parametrize("memory", [LITTLE, 1 << 24])
@pytest.mark.parametrize("epochs", [2, None])
def test_nodes_share_their_own_files_evenly(
    tmp_path: Path, memory: int, epochs: int | None
) -> None:
    def own(args: Any, ctx: NodeContext) -> list[Any]:
        path, epochs = args
        batches = ctx.parquet(path, 16, columns=["x"], epochs=epochs, even=True)
        read = [[batch["x"].tolist() for batch in batches] for _ in range(2)]
        return [read, len(list(batches)) if epochs else 0]

    folder = write(tmp_path / "data", files=3, rows=301, width=200)
    args = (f"{folder}/*.parquet", epochs)
    with launch(own, args, input_mode="own", feed_memory=memory, feed_disk=0) as cluster:
        results = cluster.results(SOON_S)
    assert [after for _, after in results] == [0, 0]
    steps = [[len(epoch) for epoch in read] for read, _ in results]
    assert steps[0] == steps[1]
    rows = [[[x for b in epoch for x in b] for epoch in read] for read, _ in results]
    assert each_once(rows, 903)


def test_training_and_validation_are_two_sources_side_by_side_with_a_feed(tmp_path: Path) -> None:
    def both(args: list[str], ctx: NodeContext) -> list[int]:
        train = ctx.parquet(args[0], 16, shuffle=True, epochs=3)
        validation = ctx.batches(16, feed=sparkdl.parquet(args[1], ["x"]))
        rows = [0, 0, 0]
        for _epoch in range(3):
            rows[0] += sum(int(batch["x"].sum()) for batch in train)
            rows[1] += sum(int(batch["x"].sum()) for batch in validation)
        rows[2] = len(read_all(None, ctx))
        return rows

    paths = [
        str(write(tmp_path / "train", rows=300, width=200)),
        str(write(tmp_path / "validation", files=1)),
    ]
    with launch(both, paths, feed_memory=1 << 18, feed_disk=0) as cluster:
        cluster.end_feeds()  # which ends neither source
        results = cluster.results(SOON_S)
    assert sum(rows[0] for rows in results) == 3 * sum(range(1200))
    assert sum(rows[1] for rows in results) == 3 * sum(range(250))


def test_steps_that_all_nodes_can_take_are_known_without_a_driver(tmp_path: Path) -> None:
    def full_steps(args: str, ctx: NodeContext) -> list[int]:
        batches = ctx.parquet(args, 16, epochs=2, even=True, tail="drop")
        return [len(batch["x"]) for _ in range(2) for batch in batches]

    folder = write(tmp_path / "data", files=1, rows=95)
    with launch(full_steps, str(folder), input_mode="own") as cluster:
        assert cluster.results(SOON_S) == [[16] * 4] * 2


def test_evaluator_reads_all_rows(tmp_path: Path) -> None:
    def own(args: Any, ctx: NodeContext) -> int:
        rows = sum(len(batch["x"]) for batch in ctx.parquet(args[0], 16, epochs=1))
        assert rows == (1000 if ctx.job_name == "evaluator" else 500)
        if ctx.job_name == "evaluator":
            args[1].open()
        elif ctx.rank == 0:
            args[1].wait()
        return rows

    args = (str(write(tmp_path / "data")), Gate.at(tmp_path / "gate"))
    with launch(own, args, nodes=3, eval_node=True, input_mode="own") as cluster:
        assert cluster.results(SOON_S)[:2] == [500, 500]


def test_files_that_are_not_there_are_an_error_in_map_fun(tmp_path: Path) -> None:
    def own(args: str, ctx: NodeContext) -> str:
        try:
            next(iter(ctx.parquet(args, 16)))
        except ConfigError as error:
            return str(error)
        return "nothing"

    with launch(own, str(tmp_path / "*.parquet"), input_mode="own") as cluster:
        for text in cluster.results(SOON_S):
            assert "no Parquet file found" in text


def test_damaged_file_is_an_error_in_map_fun_after_the_rows_before_it(tmp_path: Path) -> None:
    def own(args: str, ctx: NodeContext) -> None:
        for _batch in ctx.parquet(args, 16, epochs=1):
            pass

    folder = write(tmp_path / "data", rows=300)
    damaged = folder / "part-3.parquet"
    content = damaged.read_bytes()
    damaged.write_bytes(bytes(200) + content[200:])
    with (
        pytest.raises(NodeFailedError, match=r"ReadError: .*part-3.parquet"),
        launch(own, str(folder), nodes=1, input_mode="own") as cluster,
    ):
        cluster.wait(SOON_S)
