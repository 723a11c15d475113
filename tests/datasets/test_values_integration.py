"""Lists, structs and timestamps are the same tensors by every way that rows come."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import Row, SparkSession

import sparkdl
from sparkdl.node.context import NodeContext

pytestmark = [pytest.mark.tensorflow, pytest.mark.deep]
QUERY = """
    select int(id) as id, sequence(1, id % 3 + 1) as tokens, timestamp_micros(id * 1000001) as at,
        named_struct('a', float(id), 'b', named_struct('text', string(id))) as c
    from range(6)
"""
TOKENS = [list(range(1, i % 3 + 2)) for i in range(6)]
WAYS = ("spark", "files", "rows", "pandas", "arrow")


def read(args: None, ctx: NodeContext) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for way in WAYS:
        ragged = ctx.dataset(6, x=["id", "tokens", "c"], y="at", feed=way)
        ((x, at),) = ragged
        found[way] = sorted(
            [int(number), tokens.numpy().tolist(), int(time), float(a), text.numpy().decode()]
            for number, tokens, time, a, text in zip(
                x["id"], x["tokens"], at, x["c.a"], x["c.b.text"], strict=True
            )
        )
        (padded,) = ctx.batches(6, ["tokens"], feed=way, pad={"tokens": 4})
        assert padded["tokens"].shape == (6, 4)
        rows = zip(padded["tokens"], padded["tokens.mask"], strict=True)
        assert sorted(row[mask].tolist() for row, mask in rows) == sorted(TOKENS)
    return found


def test_values_are_the_same_whoever_reads_the_rows(spark_ml: SparkSession, tmp_path: Path) -> None:
    frame = spark_ml.sql(QUERY).coalesce(1)
    frame.write.parquet(str(tmp_path / "data"))
    rows = [
        Row(
            id=i,
            tokens=TOKENS[i],
            at=datetime.fromtimestamp(i, timezone.utc).replace(microsecond=i, tzinfo=None),
            c=Row(a=float(i), b=Row(text=str(i))),
        )
        for i in range(6)
    ]
    plain = pd.DataFrame(
        {
            "id": range(6),
            "tokens": TOKENS,
            "at": [row["at"] for row in rows],
            "c": [row["c"].asDict(recursive=True) for row in rows],
        }
    )
    data = {
        "spark": (frame, "spark"),
        "files": (spark_ml.read.parquet(str(tmp_path / "data")), "nodes"),
        "rows": (spark_ml.sparkContext.parallelize(rows, 1), "auto"),
        "pandas": (plain, "auto"),
        "arrow": (frame.toArrow(), "auto"),
    }
    with sparkdl.launch(spark_ml, read, None, nodes=1, framework="tensorflow") as cluster:
        for way, (each, reader) in data.items():
            cluster.feed(each, epochs=2, feed=way, reader=reader)
        (found,) = cluster.results()
    expected = [[i, TOKENS[i], i * 1_000_001, float(i), str(i)] for i in range(6)]
    assert found == dict.fromkeys(WAYS, expected)
