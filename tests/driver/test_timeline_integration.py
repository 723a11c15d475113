"""`Observe(timeline=…)`: one trace of all nodes, whatever becomes of them."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from sparkdl.core.options import Feeding
from sparkdl.driver.options import Observe
from sparkdl.node.context import NodeContext
from tests.doubles.map_funs import die
from tests.doubles.nodes import SOON_S, launch

ROWS, BATCH, FATAL_STEP = 400, 25, 3
Event = dict[str, Any]


def train(args: Any, ctx: NodeContext) -> int:
    """Read the feed, exchange in each step; rank 1 is killed in the first generation."""
    step = 0
    while ctx.has_epoch():
        for batch in ctx.batches(BATCH, even=True):
            with ctx.span("augment", rows=len(batch["value"])):
                loss = float(batch["value"].mean())
            ctx.all_gather(loss)
            ctx.report(step, loss=loss)
            step += 1
            if ctx.generation == 0 and step == FATAL_STEP:
                ctx.barrier()
                if ctx.rank == 1:
                    die("SIGKILL")
    return step


def events_of(trace: dict[str, Any], node: str) -> list[Event]:
    """Return what a process of the trace has done."""
    events: list[Event] = trace["traceEvents"]
    (pid,) = [
        event["pid"]
        for event in events
        if event["name"] == "process_name" and event["args"]["name"].startswith(node)
    ]
    return [event for event in events if event["pid"] == pid and event["ph"] != "M"]


def spans_of(trace: dict[str, Any], node: str, name: str) -> list[Event]:
    return [each for each in events_of(trace, node) if (each["ph"], each["name"]) == ("X", name)]


def check_nesting(trace: dict[str, Any]) -> None:
    """Check that spans of a track lie within each other or follow one another."""
    by_track = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            by_track[event["pid"], event["tid"]].append(event)
    assert by_track
    for track in by_track.values():
        stops: list[int] = []
        for event in sorted(track, key=lambda each: (each["ts"], -each["dur"])):
            while stops and stops[-1] <= event["ts"]:
                stops.pop()
            stop = event["ts"] + event["dur"]
            assert not stops or stop <= stops[-1], event
            stops.append(stop)


def test_trace_shows_both_generations_of_a_node_that_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json.gz"
    with launch(train, max_restarts=1, observe=Observe(timeline=str(path))) as cluster:
        cluster.feed([float(i) for i in range(ROWS)])
        cluster.results(3 * SOON_S)
    trace = json.loads(gzip.decompress(path.read_bytes()))
    check_nesting(trace)
    for node in ("worker:0", "worker:1"):
        phases = [e for e in events_of(trace, node) if e.get("cat") in ("launch", "train")]
        names = [event["name"] for event in sorted(phases, key=lambda each: each["ts"])]
        assert names[0] == "start agent"
        assert {"gather", "prepare", "map_fun", "wait for the other nodes"} < {*names}
        trained = spans_of(trace, node, "train")
        assert [span["args"]["generation"] for span in trained] == [0, 1]
        assert trained[0]["ts"] + trained[0]["dur"] <= trained[1]["ts"]
        steps = [e for e in events_of(trace, node) if e.get("cat") == "step"]
        assert {"loss"} == {name for step in steps for name in step["args"]}
        assert "step 0" in {step["name"] for step in steps}
        assert spans_of(trace, node, "augment")[0]["args"] == {"rows": BATCH}
        assert spans_of(trace, node, "batch")
        assert spans_of(trace, node, "wait for rows")
        assert spans_of(trace, node, "ctx.all_gather")
    killed = [e for e in events_of(trace, "worker:1") if e.get("cat") == "failure"]
    assert any("SIGKILL" in event["name"] for event in killed)
    states = [e["name"] for e in events_of(trace, "cluster") if e.get("cat") == "state"]
    assert states[:2] == ["gathering", "running"]
    assert "failing" in states
    assert states.count("running") == 2
    assert trace["otherData"]["dropped_spans"] == {}


def reduce(args: Any, ctx: NodeContext) -> None:
    import torch

    from sparkdl.collectives.connect import connect

    group = connect(ctx.rank, ctx.num_workers, ctx.all_gather, "127.0.0.1", SOON_S)
    for number in range(args):
        group.all_reduce_(torch.ones(1000), what=f"gradients {number}")
    group.close()


@pytest.mark.torch
def test_a_collective_of_two_ranks_overlaps_in_time(tmp_path: Path) -> None:
    path, count = tmp_path / "trace.json", 20
    with launch(
        reduce, count, feeding=Feeding(fed=False), observe=Observe(timeline=str(path))
    ) as cluster:
        cluster.results(3 * SOON_S)
    trace = json.loads(path.read_text())
    check_nesting(trace)
    ours, theirs = (spans_of(trace, node, "all_reduce") for node in ("worker:0", "worker:1"))
    errors_us = sum(trace["otherData"]["clock_error_us"].values())
    assert len(ours) == len(theirs) == count
    for one, other in zip(ours, theirs, strict=True):
        assert one["args"] == other["args"]
        assert one["args"]["nbytes"] == 4000
        assert one["ts"] <= other["ts"] + other["dur"] + errors_us
        assert other["ts"] <= one["ts"] + one["dur"] + errors_us
    assert "gradients 0" in ours[0]["args"]["what"]
    waits = spans_of(trace, "worker:0", "wait for members")
    assert any(one["ts"] <= wait["ts"] <= one["ts"] + one["dur"] for one in ours for wait in waits)


def test_driver_that_ends_by_an_error_leaves_what_has_happened(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    program = f"""
import sparkdl
from tests.doubles.map_funs import hang
cluster = sparkdl.launch(None, hang, None, 1, framework="plain", executor="local",
                         feeding=sparkdl.Feeding(fed=False),
                         observe=sparkdl.Observe(timeline={str(path)!r}))
raise ValueError("of the user's")
"""
    ended = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, check=False)
    assert b"of the user's" in ended.stderr
    trace = json.loads(path.read_text())
    check_nesting(trace)
    assert spans_of(trace, "worker:0", "start agent")
    assert spans_of(trace, "cluster", "running")
