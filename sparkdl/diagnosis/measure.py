"""Measures a small cluster of plain nodes: the rates of its feed and its all-reduce.

Runs in: driver, child

It is a real launch: if it fails, a training fails too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sparkdl.core.errors import FrameworkMissingError, SparkdlError
from sparkdl.core.listing import count
from sparkdl.core.options import Feeding, Recovery, Startup
from sparkdl.diagnosis.report import Check
from sparkdl.driver.launch import launch
from sparkdl.driver.options import Observe

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkdl.driver.handle import Cluster
    from sparkdl.node.context import NodeContext

FEED_S = 4.0
REDUCE_S = 2.0
START_S = 60.0
_WIDTH = 784
ROW_NBYTES = 4 * _WIDTH
_FIRST_ROWS = 10_000
_MOST_ROWS = 5_000_000
_BATCH = 1024
_REDUCED_NBYTES = 16 << 20
_SLOW_FEED_MBS = 20.0
_SLOW_REDUCE_MBS = 100.0


def measure(spark: SparkSession, nodes: int, tls: bool | None) -> Iterator[Check]:
    """Launch, feed, reduce; what fails is a problem, and the end.

    Args:
        tls: as for `Startup`.
    """
    began_s, what = time.monotonic(), "launch"
    try:
        with launch(
            spark,
            _measured,
            nodes=nodes,
            framework="plain",
            num_gpus=0,
            recovery=Recovery(hang_timeout_s=None),
            feeding=Feeding(timeout_s=START_S),
            observe=Observe(progress=False, dashboard=False, on_log=_unheard),
            startup=Startup(timeout_s=START_S, keep_warm_s=0.0, tls=tls),
        ) as cluster:
            yield Check(
                "launch",
                "ok",
                f"{count(nodes, 'plain node')} began in {time.monotonic() - began_s:.1f} s",
            )
            what = "feed rate"
            yield _judged_feed(*_feed(spark, cluster), nodes)
            what = "all-reduce rate"
            yield _judged_reduce(cluster.results(START_S)[0], nodes)
    except SparkdlError as error:
        yield Check.of_error(what, error)


def _feed(spark: SparkSession, cluster: Cluster) -> tuple[int, float]:
    """Return how many rows the nodes read in how many seconds, after calls that warm up."""
    # The first call starts Spark's Python workers, which says nothing about the feed.
    _fed(spark, cluster, _FIRST_ROWS)
    rows, took_s = _FIRST_ROWS, _fed(spark, cluster, _FIRST_ROWS)
    while took_s < FEED_S / 2 and rows < _MOST_ROWS:
        # At most ten times as many: the rate of a short call is a poor estimate.
        rows = min(_MOST_ROWS, 10 * rows, 1 + int(rows * FEED_S / took_s))
        took_s = _fed(spark, cluster, rows)
    return rows, took_s


def _fed(spark: SparkSession, cluster: Cluster, rows: int) -> float:
    """Feed so many rows; return the seconds that it took."""
    began_s = time.monotonic()
    frame = spark.range(rows).selectExpr(f"array_repeat(cast(id AS float), {_WIDTH}) AS x")
    cluster.feed(frame, reader="spark")
    return time.monotonic() - began_s


def _judged_feed(rows: int, took_s: float, nodes: int) -> Check:
    mbs = rows * ROW_NBYTES / took_s / 1e6
    finding = (
        f"{rows / took_s:,.0f} rows/s, {mbs:,.0f} MB/s into {count(nodes, 'node')} "
        f"({rows:,} rows of {_WIDTH} floats in {took_s:.1f} s)"
    )
    if mbs >= _SLOW_FEED_MBS:
        return Check("feed rate", "ok", finding)
    return Check(
        "feed rate",
        "warning",
        finding,
        "Look at the settings above, at other jobs on these hosts and at the network between them. "
        "Rows in Parquet need not cross Spark: cluster.feed('path')",
    )


def _judged_reduce(found: Any, nodes: int) -> Check:
    name = "all-reduce rate"
    if nodes < 2:
        return Check(name, "skipped", "needs two nodes, and there is one")
    if isinstance(found, str):
        return Check(name, "skipped", found)
    mbs = _REDUCED_NBYTES / found / 1e6
    finding = (
        f"{_REDUCED_NBYTES >> 20} MiB in {found * 1e3:.1f} ms between {nodes} nodes, "
        f"{mbs:,.0f} MB/s"
    )
    if mbs >= _SLOW_REDUCE_MBS:
        return Check(name, "ok", finding)
    return Check(
        name,
        "warning",
        finding,
        "Every step waits for its gradients: use a faster network between the hosts, fewer nodes, "
        "or larger batches. SPARKDL_NODE_HOST chooses among several networks",
    )


def _measured(args: Any, ctx: NodeContext) -> Any:
    """Read rows until they end; return the seconds of one all-reduce, or why there is none."""
    while ctx.has_epoch():
        for _ in ctx.batches(_BATCH):
            pass
    return _reduce(ctx)


def _reduce(ctx: NodeContext) -> float | str:
    from sparkdl.collectives.connect import connect
    from sparkdl.collectives.transport import Op, Reduction

    size = ctx.num_workers
    try:
        group = connect(ctx.rank, size, ctx.all_gather, ctx.member.host, START_S)
    except FrameworkMissingError as error:
        return str(error)
    try:
        import torch

        numbers, total = torch.ones(_REDUCED_NBYTES // 4), Reduction(Op.SUM)
        # The first one connects and allocates, so it is not timed.
        group.all_reduce_(numbers, total)
        began_s = time.monotonic()
        group.all_reduce_(numbers, total)
        # All nodes must repeat it equally often, so the slowest one's time decides.
        slowest_s = max(ctx.all_gather(time.monotonic() - began_s))
        times = max(1, min(100, int(REDUCE_S / slowest_s)))
        began_s = time.monotonic()
        for _ in range(times):
            group.all_reduce_(numbers, total)
        return (time.monotonic() - began_s) / times
    finally:
        group.close()


def _unheard(line: Any) -> None:
    """Nodes print nothing of interest here."""
