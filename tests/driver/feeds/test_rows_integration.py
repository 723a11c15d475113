"""What a model has learnt when its nodes were killed: each row once an epoch, none lost or twice.

The model is the rows themselves: a checkpoint saves which ones each node has used.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sparkdl
from sparkdl.core.options import Feeding
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import SOON_S, launch

ROWS = 400


def train(args: dict[str, Any], ctx: NodeContext) -> dict[str, Any]:
    """Use rows, save after every third step, and die where the test says."""
    last, name = ctx.last_checkpoint, f"rows-{ctx.rank}"
    step = last.step if last else 0
    model: list[int] = json.loads(Path(last, name).read_text()) if last else []
    restored = len(model)
    options = {"batch_size": 9, "even": True, **args["options"]}
    own = args["own"]
    batches = ctx.batches(feed=sparkdl.parquet(own) if own else "input", **options)
    is_over = False
    while not is_over:
        is_over = True
        for batch in batches:
            is_over = False
            weights = batch.get("sample_weight", np.ones(9))
            model += batch["value"][weights > 0].tolist()
            step += 1
            if step % 3 == 0:
                with ctx.checkpoint(step) as folder:
                    (folder / name).write_text(json.dumps(model))
            if args["deaths"].get(str(ctx.generation)) == [ctx.rank, step]:
                os.kill(os.getpid(), signal.SIGKILL)
        if own:  # files have no last epoch
            is_over = sum(ctx.all_gather(len(model))) == 2 * ROWS
    return {"model": model, "restored": restored, "generation": ctx.generation, "step": step}


@pytest.mark.parametrize(
    ("options", "source"),
    [
        pytest.param({"tail": "pad"}, "rows", marks=pytest.mark.deep),
        ({"tail": "pad", "shuffle": 50}, "rows"),
        pytest.param({"tail": "pad", "shuffle": True}, "files", marks=pytest.mark.deep),
        pytest.param({"tail": "pad", "shuffle": 30}, "own files", marks=pytest.mark.deep),
    ],
    ids=["in order", "mixed", "files", "own files"],
)
def test_final_model_has_each_row_once_an_epoch_however_often_nodes_die(
    options: dict[str, Any], source: str, tmp_path: Path
) -> None:
    """A node dies in the first epoch, another one in the second, which reads its log again."""
    deaths = {"0": [1, 8], "1": [0, 32]}
    data: Any = list(range(ROWS))
    if "files" in source:
        (tmp_path / "data").mkdir()
        table = pa.table({"value": np.arange(ROWS)})
        pq.write_table(table, tmp_path / "data" / "all.parquet", row_group_size=64)
        data = sparkdl.parquet(str(tmp_path / "data"))
    is_own = source == "own files"
    args = {"options": options, "deaths": deaths, "own": str(tmp_path / "data") if is_own else ""}
    folder = str(tmp_path / "checkpoints")
    fed = Feeding(fed=not is_own)
    with launch(train, args, max_restarts=2, checkpoint_dir=folder, feeding=fed) as cluster:
        if not is_own:
            report = cluster.feed(data, epochs=2)
            assert report.rows_fed == 2 * ROWS
        results = cluster.results(3 * SOON_S)
    learnt = Counter(row for result in results for row in result["model"])
    assert learnt == dict.fromkeys(range(ROWS), 2)
    assert all(result["restored"] and result["generation"] == 2 for result in results)
