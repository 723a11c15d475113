"""A trace is valid JSON after each write, whatever comes then."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sparkdl.control.trace_file import TraceFile, TrackIds, complete, instant
from tests.doubles.limits import full_disk


def read(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    trace: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return trace


def names(path: Path) -> list[str]:
    return [event["name"] for event in read(path)["traceEvents"]]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_file_is_complete_after_each_write(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"of another training" * 1000)
    file = TraceFile(path)
    assert names(path) == []
    going_on = complete("goes on", "train", 1, 2, 0, 99)
    file.write((), (going_on,), {"dropped": 0})
    assert names(path) == ["goes on"]
    file.write([instant("first", "failure", 1, 2, 5)], (going_on, going_on), {"dropped": 1})
    assert names(path) == ["first", "goes on", "goes on"]
    file.write([complete("second", "user", 1, 2, 5, 7, {"rows": 3})], (), {"dropped": 2})
    file.close()
    assert names(path) == ["first", "second"]
    assert read(path)["otherData"] == {"dropped": 2}
    assert read(path)["traceEvents"][1] == {
        **{"ph": "X", "name": "second", "cat": "user", "pid": 1, "tid": 2, "ts": 5, "dur": 7},
        "args": {"rows": 3},
    }


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_file_on_a_full_disk_ends_before_what_has_no_room(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    file = TraceFile(path)
    file.write([instant("kept", "failure", 1, 2, 5)], (), {"about": "x" * 100})
    room = path.stat().st_size
    many = [instant(f"{number * 7919 % 1000}", "user", 1, 2, number) for number in range(1000)]
    with full_disk(room + 50), pytest.raises(OSError, match="large"):
        file.write(many, (), {})
    assert names(path) == ["kept"]
    file.close()


def test_tracks_with_names_have_ids_that_no_thread_has() -> None:
    ids = TrackIds()
    events = [*ids.named(1, 77, "MainThread"), *ids.named(1, "steps"), *ids.named(1, "steps")]
    assert [event["name"] for event in events] == ["thread_name", "thread_sort_index"] * 2
    assert ids.tid(1, 77) == 77
    assert ids.tid(1, "steps") >= 1 << 22
    thread, steps = events[1]["args"]["sort_index"], events[3]["args"]["sort_index"]
    assert steps < thread
