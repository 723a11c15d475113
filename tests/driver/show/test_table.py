"""What a cluster shows of itself, in all its states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sparkdl.control.messages import ChildReturned, FeedCount
from sparkdl.core.errors import LaunchError
from sparkdl.core.failure import Failure
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.core.world import Address, build_world
from sparkdl.driver.controller import View
from sparkdl.driver.lifecycle.roster import Roster
from sparkdl.driver.lifecycle.state import Failed, Finished, Running, Stopped, Stopping
from sparkdl.driver.show.table import as_html, node_state

SPEC = ClusterSpec("c0ffee", plan_nodes(3, 1), framework="plain")
WORLD = build_world(0, {node: Address("10.0.0.1", 1, "") for node in SPEC.nodes})
RUNNING = Running(Roster(SPEC), WORLD, frozenset({0, 1}))
FAILURE = Failure("worker:0", "exception", "<b>no</b>", 0.0, node_id=1, rank=0, host="10.0.0.1")
RETURNED = {1: ChildReturned(0, b"")}


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (RUNNING, ["in map_fun", "in map_fun", "starting"]),
        (replace(RUNNING, returned=RETURNED), ["in map_fun", "returned", "starting"]),
        (Finished(Roster(SPEC), WORLD, RETURNED), ["stopped", "returned", "stopped"]),
        (Failed(Roster(SPEC), (FAILURE,)), ["stopped", "failed", "stopped"]),
        (Stopping(Roster(SPEC), RUNNING, 0.0), ["stopping"] * 3),
        (Stopped(replace(RUNNING, returned=RETURNED)), ["stopped", "returned", "stopped"]),
    ],
)
def test_node_says_what_it_does(state: Any, words: list[str]) -> None:
    assert [node_state(View(state), node.node_id) for node in SPEC.nodes] == words


def test_table_has_a_line_for_each_node_and_a_column_for_each_feed() -> None:
    feeds = {
        (1, "input"): FeedCount("input", rows_consumed=12_345, steps=10, epochs_done=1),
        (2, "a&b"): FeedCount("a&b", rows_consumed=1),
    }
    html = as_html(SPEC, WORLD, View(RUNNING, feeds, pids={1: 4711}), "http://h:1/?a&b")
    lines = html.split("<tr>")[1:]
    assert len(lines) == 1 + 3
    assert "feed &#x27;a&amp;b&#x27;</th>" in lines[0]
    assert lines[1].count("<td") == 7
    for cell in ("worker:0", "0", "10.0.0.1", "4711", "12,345 rows, 10 steps, 1 epoch", ""):
        assert f">{cell}</td>" in lines[1]
    assert 'href="http://h:1/?a&amp;b"' in html


def test_table_of_a_failed_cluster_names_the_root_cause_and_nothing_of_it_is_html() -> None:
    html = as_html(SPEC, WORLD, View(Failed(Roster(SPEC), (FAILURE,), world=WORLD)))
    assert "NodeFailedError: worker:0" in html
    assert "&lt;b&gt;no&lt;/b&gt;" in html
    assert "<b>no" not in html
    stopped = Stopped(Failed(Roster(SPEC), (), LaunchError("the job was <cancelled>")))
    assert "LaunchError: the job was &lt;cancelled&gt;" in as_html(SPEC, WORLD, View(stopped))
