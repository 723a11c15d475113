"""Nodes take the same global batches however many they are, and whoever dies."""

from __future__ import annotations

import json
import os
import signal
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sparkdl
from sparkdl.core.errors import ConfigError, NodeFailedError
from sparkdl.core.options import Feeding
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import SOON_S, launch

ROWS, BATCH = 1000, 32
Steps = list[list[int]]


def use(args: dict[str, Any], ctx: NodeContext) -> Steps:
    """Return the rows of each step; save them after some, and die where the test says."""
    last, name = ctx.last_checkpoint, f"rows-{ctx.rank}"
    # With fewer nodes than before, the first one has the steps of the others.
    steps: Steps = json.loads(Path(last, name).read_text()) if last else []
    while ctx.has_epoch():
        for batch in ctx.batches(even=True, tail=args.get("tail", "short")):
            weights = batch.get("sample_weight", np.ones(len(batch["value"])))
            steps.append(batch["value"][weights > 0].tolist())
            if len(steps) % 5 == 0 and ctx.checkpoint_dir:
                with ctx.checkpoint(len(steps)) as folder:
                    (folder / name).write_text(json.dumps(steps))
            if args.get("deaths", {}).get(ctx.generation) == (ctx.rank, len(steps)):
                os.kill(os.getpid(), signal.SIGKILL)
    maps = Path(f"/proc/{os.environ['SPARKDL_AGENT_PID']}/maps").read_text()
    assert "pandas" not in maps, "its import takes an agent 40 MB, and a third of a second"
    return steps


def trained(nodes: int, data: Any, args: dict[str, Any], folder: Path | None = None) -> Steps:
    """Return the rows of each global batch in two epochs."""
    order: dict[str, Any] = {"shuffle": "global", "seed": 7} if args.get("is_shuffled") else {}
    options: dict[str, Any] = {"max_restarts": 3, "checkpoint_dir": str(folder)} if folder else {}
    little = Feeding(global_batch_size=BATCH, memory_nbytes=1 << 14)
    with launch(use, args, nodes, feeding=little, **options) as cluster:
        report = cluster.feed(data, 2, **order)
        assert report.rows_unused == 0
        results = cluster.results(3 * SOON_S)
    return [[row for part in step for row in part] for step in zip(*results, strict=True)]


def of_data(rows: int = ROWS) -> Steps:
    return [[*range(i, min(rows, i + BATCH))] for i in range(0, rows, BATCH)]


@pytest.fixture
def files(tmp_path: Path) -> Any:
    rows = pa.table({"value": range(ROWS), "more": [bytes(1000)] * ROWS})
    pq.write_table(rows, tmp_path / "all.parquet", row_group_size=90)
    return sparkdl.parquet(str(tmp_path / "all.parquet"))


def test_shuffled_rows_without_room_to_wait_for_all_are_an_error_at_once(files: Any) -> None:
    little = Feeding(global_batch_size=BATCH, memory_nbytes=1 << 14, disk_nbytes=0)
    too_little = pytest.raises(ConfigError, match="take more than its memory and disk for feeds")
    with launch(use, {}, 2, feeding=little) as cluster, too_little:
        cluster.feed(files, shuffle="global")


def test_batch_with_fewer_rows_than_nodes_is_one_behind_a_restart_too(tmp_path: Path) -> None:
    rows = 5 * BATCH + 1
    assert trained(3, range(rows), {"deaths": {0: (1, 6)}}, tmp_path) == 2 * of_data(rows)


def test_batches_are_those_of_the_data_on_any_number_of_nodes(files: Any) -> None:
    assert trained(2, range(ROWS), {}) == 2 * of_data()
    assert trained(3, files, {"tail": "pad"}) == 2 * of_data()
    assert trained(2, files, {"tail": "drop"}) == 2 * of_data()[:-1], "992 rows are in full ones"


def test_deaths_change_no_batch_in_data_order_or_shuffled(files: Any, tmp_path: Path) -> None:
    deaths = {0: (1, 8), 1: (0, 33), 2: (1, 50)}
    assert trained(2, files, {"deaths": deaths}, tmp_path / "a") == 2 * of_data()
    alone = trained(1, range(ROWS), {"is_shuffled": True})
    killed = {"is_shuffled": True, "deaths": deaths}
    assert trained(3, files, killed, tmp_path / "b") == alone
    first, second = ([*chain(*epoch)] for epoch in (alone[:32], alone[32:]))
    assert sorted(first) == sorted(second) == [*range(ROWS)]
    assert first != second != [*range(ROWS)]


def test_what_has_no_fixed_order_is_refused() -> None:
    def refused(args: None, ctx: NodeContext) -> list[str]:
        words = []
        for ask in (
            lambda: ctx.batches(4),
            lambda: ctx.batches(shuffle=True),
            lambda: ctx.batches(feed=sparkdl.parquet("/data")),
            lambda: ctx.batches(tail="drop"),
            ctx.get_data_feed,
        ):
            with pytest.raises(ConfigError) as error:
                ask()
            words.append(str(error.value).split()[0])
        return words

    with launch(refused, nodes=2, feeding=Feeding(global_batch_size=5)) as cluster:
        told = ["batch_size=4:", "shuffle=True", "feed=sparkdl.parquet(…)", "tail='drop':"]
        assert cluster.results(SOON_S) == 2 * [[*told, "ctx.get_data_feed"]]
    with pytest.raises(ConfigError, match="must be at least 2, a row"):
        launch(refused, nodes=2, feeding=Feeding(global_batch_size=1))
    missing = pytest.raises(NodeFailedError, match="batch_size is missing")
    with missing, launch(use, {}) as cluster:
        with pytest.raises(ConfigError, match="seed=3 is of shuffle="):
            cluster.feed([1], shuffle="global", seed=3)
        cluster.feed([1, 2])
