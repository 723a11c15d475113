"""Where the events of a cluster belong in its trace; and which files cannot be one."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkdl.control.messages import ChildFailed, ChildRunning, ClockTold, Hello, Offer, Traced
from sparkdl.control.trace_file import Event
from sparkdl.core.errors import ConfigError
from sparkdl.core.failure import Failure
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.core.trace import Span
from sparkdl.dashboard.events import Changed, Place, Problem
from sparkdl.driver.timeline import Tracks, check_file
from tests.doubles.nodes import launch

ZERO_US = 1_000_000
HOSTS_US = 7_000_000_000


def tracks() -> Tracks:
    return Tracks(ClusterSpec("c", plan_nodes(2)), ZERO_US)


def hello(node_id: int) -> Hello:
    return Hello(node_id, 0, f"a{node_id}", "host", 1, "", "3.11", "process")


def shown(events: list[Event]) -> list[tuple[str, int, int]]:
    """Return name, begin and length of what is no name of a track."""
    return [(each["name"], each["ts"], each.get("dur", -1)) for each in events if each["ph"] != "M"]


def test_phases_of_a_node_follow_one_another_up_to_its_failure() -> None:
    of, at_us = tracks(), ZERO_US
    events = [*of.begin(), *of.reached(1, hello(1), at_us + 10), *of.reached(1, Offer(0, 5), at_us)]
    running = Changed("c", 0.0, "running", 0, (Place(1, 0, "host"),))
    events += [*of.happened(running, at_us + 30), *of.reached(1, ChildRunning(0, 7), at_us + 40)]
    failure = Failure("worker:1", "exit", "", 0.0, exit_code=3)
    events += of.reached(1, ChildFailed(0, failure), at_us + 70)
    events += [*of.reached(1, None, at_us + 80), *of.reached(1, hello(1), at_us + 90)]
    of_node = [event for event in events if event["pid"] == 2]
    assert shown(of_node) == [
        ("start agent", 0, 10),
        ("gather", 10, 20),
        ("prepare", 30, 10),
        ("train", 40, 30),
        (failure.headline(), 70, -1),
    ]
    trained = next(event for event in of_node if event["name"] == "train")
    assert trained["args"] == {"generation": 0, "failure": failure.headline()}
    still = {(e["name"], e["pid"]): e["dur"] for e in of.open_events(at_us + 100)}
    assert still == {("start agent", 1): 100, ("gather", 2): 10, ("running", 3): 70}


def test_problem_is_shown_once_in_each_generation() -> None:
    of, problem = tracks(), Problem("worker:0", "worker:0 was killed")
    events: list[Event] = []
    for state, generation in (("failing", 0), ("failed", 0), ("failing", 1)):
        events += of.happened(Changed("c", 0.0, state, generation, (), (problem,)), ZERO_US)
    assert [event["name"] for event in events if event["ph"] == "i"] == ["worker:0 was killed"] * 2


def test_spans_of_a_child_are_shown_by_the_drivers_clock() -> None:
    of = tracks()
    spans = (
        Span("launch", "long before", 9, HOSTS_US - 5000, 100),
        Span("launch", "import", 9, HOSTS_US - 100, 300),
        Span("step", "step 0", "steps", HOSTS_US + 300, 50, {"loss": 0.5}),
    )
    told = Traced(2, spans, 0, {9: "MainThread"})
    unknown = [*of.told("a1", 1, told, ZERO_US)]
    assert shown(unknown) == [("3 spans were dropped", 0, -1)]
    assert of.about()["dropped_spans"] == {"worker:1": 3}
    assert not [*of.measured("a1", 1, ClockTold(ZERO_US, HOSTS_US + 5), ZERO_US + 10)]
    events = [*of.told("a1", 1, told, ZERO_US + 900)]
    assert shown(events) == [("import", 0, 200), ("step 0", 300, 50)]
    named = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert named == ["MainThread, generation 2", "steps"]
    assert of.about()["clock_error_us"] == {"worker:1": 6}


def test_what_a_child_has_dropped_is_shown_where_it_is_missing() -> None:
    of = tracks()
    assert shown([*of.told("a0", 0, Traced(0, (), 12), ZERO_US + 40)]) == [
        ("12 spans were dropped", 40, -1)
    ]
    assert [*of.told("a0", 0, Traced(0, (), 1), ZERO_US)]
    assert of.about()["dropped_spans"] == {"worker:0": 13}


def test_path_that_cannot_be_a_file_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("a file")
    wrongs = {
        "hdfs://name/trace.json": "is a URL",
        "": "give the path of a file",
        str(tmp_path): "Is a directory",
        str(tmp_path / "plain" / "trace.json"): "Choose another file, or leave timeline out",
    }
    for path, words in wrongs.items():
        with pytest.raises(ConfigError, match=words):
            launch(print, timeline=path)
    assert check_file("timeline", tmp_path / "new" / "t.json") == str(tmp_path / "new" / "t.json")
