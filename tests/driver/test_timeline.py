"""Where the events of a cluster belong in its trace; and which files cannot be one."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
from msgspec.structs import replace

from sparkdl.control.messages import Traced
from sparkdl.control.trace_file import Event
from sparkdl.core.errors import ConfigError
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.core.trace import Span
from sparkdl.driver.events import Changed, ClockRead, NodeMoved, Place, Problem, Spanned
from sparkdl.driver.timeline import Tracks, check_file

ZERO_US = 1_000_000
HOSTS_US = 7_000_000_000


def tracks() -> Tracks:
    return Tracks(ClusterSpec("c", plan_nodes(2)), ZERO_US)


def moved(at_us: int, node_id: int, phase: str, generation: int = -1, **about: str) -> NodeMoved:
    return NodeMoved("c", at_us / 1e6, node_id, phase, generation, **about)


def shown(events: list[Event]) -> list[tuple[str, int, int]]:
    """Return name, begin and length of what is no name of a track."""
    return [(each["name"], each["ts"], each.get("dur", -1)) for each in events if each["ph"] != "M"]


def test_phases_of_a_node_follow_one_another_up_to_its_failure() -> None:
    of, at_us = tracks(), ZERO_US
    happened = [
        moved(at_us + 10, 1, "joined", host="host"),
        moved(at_us + 20, 1, "offered", 0),
        Changed("c", (at_us + 30) / 1e6, "running", 0, (Place(1, 0, "host"),)),
        moved(at_us + 40, 1, "entered", 0),
        moved(at_us + 70, 1, "failed", 0, problem="worker:1 exited"),
        moved(at_us + 80, 1, "left"),
        moved(at_us + 90, 1, "joined", host="host"),
    ]
    events = [*of.begin(), *chain.from_iterable(map(of.add, happened))]
    of_node = [event for event in events if event["pid"] == 2]
    assert shown(of_node) == [
        ("start agent", 0, 10),
        ("gather", 10, 20),
        ("prepare", 30, 10),
        ("train", 40, 30),
        ("worker:1 exited", 70, -1),
    ]
    trained = next(event for event in of_node if event["name"] == "train")
    assert trained["args"] == {"generation": 0, "failure": "worker:1 exited"}
    still = {(e["name"], e["pid"]): e["dur"] for e in of.open_events(at_us + 100)}
    assert still == {("start agent", 1): 100, ("gather", 2): 10, ("running", 3): 70}


def test_problem_is_shown_once_in_each_generation() -> None:
    of, problem = tracks(), Problem("worker:0", "worker:0 was killed")
    events: list[Event] = []
    for state, generation in (("failing", 0), ("failed", 0), ("failing", 1)):
        events += of.add(Changed("c", 1.0, state, generation, (), (problem,)))
    assert [event["name"] for event in events if event["ph"] == "i"] == ["worker:0 was killed"] * 2


def test_spans_of_a_child_are_shown_by_the_drivers_clock() -> None:
    of = tracks()
    spans = (
        Span("launch", "long before", 9, HOSTS_US - 5000, 100),
        Span("launch", "import", 9, HOSTS_US - 100, 300),
        Span("step", "step 0", "steps", HOSTS_US + 300, 50, {"loss": 0.5}),
    )
    told = Traced(2, spans, 0, {9: "MainThread"})
    unknown = [*of.add(Spanned("c", ZERO_US / 1e6, "a1", 1, told))]
    assert shown(unknown) == [("3 spans were dropped", 0, -1)]
    assert of.about()["dropped_spans"] == {"worker:1": 3}
    read = ClockRead("c", (ZERO_US + 10) / 1e6, "a1", 1, ZERO_US, HOSTS_US + 5)
    assert not [*of.add(read)]
    events = [*of.add(Spanned("c", (ZERO_US + 900) / 1e6, "a1", 1, told))]
    assert shown(events) == [("import", 0, 200), ("step 0", 300, 50)]
    named = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert named == ["MainThread, generation 2", "steps"]
    assert of.about()["clock_error_us"] == {"worker:1": 6}


def test_what_a_child_has_dropped_is_shown_where_it_is_missing() -> None:
    of = tracks()
    dropped = Spanned("c", (ZERO_US + 40) / 1e6, "a0", 0, Traced(0, (), 12))
    assert shown([*of.add(dropped)]) == [("12 spans were dropped", 40, -1)]
    assert [*of.add(replace(dropped, traced=Traced(0, (), 1)))]
    assert of.about()["dropped_spans"] == {"worker:0": 13}


def test_path_that_cannot_be_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("a file")
    wrongs = {
        "hdfs://name/trace.json": "is a URL",
        "": "give the path of a file",
        str(tmp_path): "Is a directory",
        str(tmp_path / "plain" / "trace.json"): "Choose another file, or leave timeline out",
    }
    for path, words in wrongs.items():
        with pytest.raises(ConfigError, match=words):
            check_file("timeline", path)
    assert check_file("timeline", tmp_path / "new" / "t.json") == str(tmp_path / "new" / "t.json")
