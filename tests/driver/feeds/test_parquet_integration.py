"""Parquet files on their way into a whole cluster, read by the nodes; one test with Spark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sparkdl
from sparkdl.core.errors import ConfigError, ReadError
from sparkdl.core.options import Feeding
from sparkdl.node.context import NodeContext
from sparkdl.storage.parquet.source import list_files
from tests.doubles.labs import Lab, lab

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


def read_epochs(args: tuple[str, int], ctx: NodeContext) -> list[list[int]]:
    """Read so many epochs of a feed; return column "x" of each."""
    feed, epochs = args
    batches = ctx.batches(16, ["x"], feed, even=True)
    return [[x for batch in batches for x in batch["x"].tolist()] for _ in range(epochs)]


def read_all(feed: str, ctx: NodeContext) -> list[int]:
    """Read a feed to its end; return column "x"."""
    data, found = ctx.get_data_feed(qname_in=feed, input_mapping={"x": "x"}), []
    while not data.should_stop():
        found += [int(x) for x in data.next_batch(16).get("x", [])]
    return found


@pytest.fixture(scope="module")
def own(run_name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Two nodes that read data of their own, of which they hold 64 KiB."""
    folder = tmp_path_factory.mktemp("own")
    with lab(
        folder, "plain", 2, feeding=Feeding(fed=False, memory_nbytes=LITTLE, disk_nbytes=0)
    ) as made:
        yield made


def each_once(results: list[list[list[int]]], rows: int) -> bool:
    """Whether in each epoch each row came to one node, once."""
    return all(
        Counter(x for node in epoch for x in node) == Counter(range(rows))
        for epoch in zip(*results, strict=True)
    )


# fed by the driver's plan


def test_every_row_is_read_once_an_epoch_and_the_files_once(
    roomy: Lab, feed: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "data")
    roomy.begin(read_epochs, (feed, 3))
    report = roomy.cluster.feed(f"{folder}/*.parquet", 3, feed)
    assert (report.epochs, report.passes) == (3, 1)
    assert report.rows == {"worker:0": 1500, "worker:1": 1500}
    assert (report.rows_used, report.rows_unused) == (3000, 0)
    assert each_once(roomy.ended(feed), 1000)


@pytest.mark.parametrize(("nodes", "passes"), [("little", 2), ("disk", 1)], indirect=["nodes"])
def test_files_that_do_not_fit_are_read_for_each_epoch_or_again_from_disk(
    nodes: Lab, feed: str, tmp_path: Path, passes: int
) -> None:
    folder = write(tmp_path / "data", rows=300, width=200)  # 1 MB
    nodes.begin(read_epochs, (feed, 2))
    report = nodes.cluster.feed(folder, 2, feed)
    assert (report.epochs, report.passes) == (2, passes)
    assert each_once(nodes.ended(feed), 1200)


def test_vanished_file_is_an_error_that_names_node_and_file_and_ends_only_this_feed(
    roomy: Lab, feed: str, tmp_path: Path
) -> None:
    good, bad = write(tmp_path / "good"), write(tmp_path / "bad", start=5000)
    source = list_files(str(bad))
    (bad / "part-3.parquet").unlink()
    roomy.begin(read_all, feed)
    with pytest.raises(ReadError, match=r"worker:1 could not read its share: .*part-3.parquet"):
        roomy.cluster.feed(source, 2, feed)
    assert roomy.cluster.feed(good, 2, feed).epochs == 2
    fed = Counter(x for node in roomy.ended(feed) for x in node if x < 5000)
    assert fed == Counter([*range(1000)] * 2)


# asked for by user code


@pytest.mark.parametrize("nodes", ["own", "roomy"], indirect=True)
def test_nodes_share_their_own_files_evenly(nodes: Lab, tmp_path: Path) -> None:
    def own(path: str, ctx: NodeContext) -> list[list[list[int]]]:
        batches = ctx.batches(16, ["x"], feed=sparkdl.parquet(path), even=True)
        return [[batch["x"].tolist() for batch in batches] for _ in range(2)]

    folder = write(tmp_path / "data", files=3, rows=301, width=200)
    nodes.begin(own, f"{folder}/*.parquet")
    results = nodes.results()
    steps = [[len(epoch) for epoch in read] for read in results]
    assert steps[0] == steps[1]
    rows = [[[x for b in epoch for x in b] for epoch in read] for read in results]
    assert each_once(rows, 903)


def test_training_and_validation_are_two_sources_side_by_side_with_a_feed(
    little: Lab, feed: str, tmp_path: Path
) -> None:
    def both(args: list[str], ctx: NodeContext) -> list[int]:
        train = ctx.batches(16, feed=sparkdl.parquet(args[0]), shuffle=True)
        validation = ctx.batches(16, feed=sparkdl.parquet(args[1], ["x"]))
        rows = [0, 0, 0]
        for _epoch in range(3):
            rows[0] += sum(int(batch["x"].sum()) for batch in train)
            rows[1] += sum(int(batch["x"].sum()) for batch in validation)
        rows[2] = len(read_all(args[2], ctx))
        return rows

    train = str(write(tmp_path / "train", rows=300, width=200))
    validation = str(write(tmp_path / "validation", files=1))
    little.begin(both, [train, validation, feed])
    results = little.ended(feed)  # which ends neither source
    assert sum(rows[0] for rows in results) == 3 * sum(range(1200))
    assert sum(rows[1] for rows in results) == 3 * sum(range(250))


def test_steps_that_all_nodes_can_take_are_known_without_a_driver(own: Lab, tmp_path: Path) -> None:
    def full_steps(args: str, ctx: NodeContext) -> list[int]:
        batches = ctx.batches(16, feed=sparkdl.parquet(args), even=True, tail="drop")
        return [len(batch["x"]) for _ in range(2) for batch in batches]

    own.begin(full_steps, str(write(tmp_path / "data", files=1, rows=95)))
    assert own.results() == [[16] * 4] * 2


def test_cluster_that_reads_its_own_data_is_not_fed(own: Lab) -> None:
    own.begin(read_all, "input")
    with pytest.raises(ConfigError, match=r"launch it without Feeding\(fed=False\)"):
        own.cluster.feed([1])
    with pytest.raises(ConfigError, match=r"feed 'input' cannot be read.*fed=False"):
        own.results()
