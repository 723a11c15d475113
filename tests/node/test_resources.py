"""What a node finds on its executor, on machines of every kind."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from sparkdl.core.errors import ConfigError
from sparkdl.core.settings import Environment
from sparkdl.node import resources
from tests.control.rooms import has_ipv6

NOTHING_SET = Environment()
MIB, GIB = 1024**2, 1024**3


@pytest.mark.parametrize("own", ["127.0.0.1", *(["::1"] if has_ipv6() else [])])
def test_a_port_of_the_own_address_is_held_and_not_listened_at(own: str) -> None:
    assert resources.own_host((own, 80), NOTHING_SET) == own, "on the way to the peer"
    with resources.reserve_port(own, NOTHING_SET) as sock:
        host, port = sock.getsockname()[:2]
        assert (host, port > 0) == (own, True)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, port))
        with closing(socket.socket(sock.family)) as other, pytest.raises(OSError, match="in use"):
            other.bind((host, port))


def test_the_port_that_is_asked_for_is_reserved_or_refused_by_name() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"^port {port} of 127.0.0.1 cannot.*TENSORFLOW_PORT"):
            resources.reserve_port("127.0.0.1", Environment(node_port=port))
    with resources.reserve_port("127.0.0.1", Environment(node_port=port)) as sock:
        assert sock.getsockname()[1] == port


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({"SPARK_EXECUTOR_DIRS": "{a}:{b}", "LOCAL_DIRS": "{b}"}, "a"),
        ({"LOCAL_DIRS": "{b},{a}"}, "b"),
        ({"SPARK_EXECUTOR_DIRS": "{missing}", "LOCAL_DIRS": "{b}"}, "b"),
        ({"SPARK_EXECUTOR_DIRS": "", "SPARK_LOCAL_DIRS": "{a}"}, "a"),
    ],
)
def test_files_are_where_spark_cleans(tmp_path: Path, environ: dict[str, str], wanted: str) -> None:
    places = {name: tmp_path / name for name in ("a", "b", "missing")}
    places["a"].mkdir()
    places["b"].mkdir()
    given = {name: value.format(**places) for name, value in environ.items()}
    assert resources.work_root(given) == places[wanted]


@pytest.mark.parametrize(
    ("total", "limit", "budget"),
    [
        (64 * GIB, None, 8 * GIB),
        (64 * GIB, 16 * GIB, 2 * GIB),
        (16 * GIB, 1 << 62, 2 * GIB),
        (256 * MIB, None, 64 * MIB),
    ],
)
def test_the_feeds_memory_is_an_eighth_of_what_there_is(
    monkeypatch: pytest.MonkeyPatch, total: int, limit: int | None, budget: int
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=total))
    monkeypatch.setattr(resources, "cgroup_limit", lambda: limit)
    assert resources.feed_memory(None) == budget
    assert resources.feed_memory(12345) == 12345, "what was asked for"


@pytest.fixture
def cgroup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], None]:
    def make(name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(resources, "memory_cgroups", lambda: [tmp_path / "missing", tmp_path])

    return make


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("memory.max", "1073741824\n", GIB),
        ("memory.max", "max\n", None),
        ("memory.limit_in_bytes", "2147483648\n", 2 * GIB),
        ("memory.events", "oom 0\n", None),
    ],
)
def test_the_cgroups_limit_is_found_in_either_version(
    cgroup: Callable[[str, str], None], name: str, text: str, limit: int | None
) -> None:
    cgroup(name, text)
    assert resources.cgroup_limit() == limit


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("0::/a/b\n", ["a/b", "unified/a/b", "", "unified"]),
        ("5:cpu,memory:/x\n3:pids:/y\n", ["memory/x", "memory"]),
        ("3:pids:/y\n", []),
    ],
)
def test_the_memory_cgroups_of_this_process_are_found(
    monkeypatch: pytest.MonkeyPatch, lines: str, found: list[str]
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: lines)
    assert resources.memory_cgroups() == [Path("/sys/fs/cgroup", name) for name in found]


@pytest.mark.parametrize(
    ("names", "wanted"),
    [(["python3", "java", "bash"], 2), (["python3", "jsvc.java"], 2), (["python3", "bash"], None)],
)
def test_the_executors_jvm_is_the_nearest_java_among_the_parents(
    monkeypatch: pytest.MonkeyPatch, names: list[str], wanted: int | None
) -> None:
    parents = [SimpleNamespace(name=lambda n=n: n, pid=pid) for pid, n in enumerate(names, 1)]
    worker = SimpleNamespace(parents=lambda: parents, net_connections=lambda kind: [])
    monkeypatch.setattr(psutil, "Process", lambda: worker)
    assert resources.executor_jvm_pid() == wanted


@pytest.mark.parametrize(
    ("assigned", "gpus"),
    [
        ({"gpu": SimpleNamespace(addresses=["1", "3"])}, ("1", "3")),
        ({"gpu": SimpleNamespace(addresses=[])}, ()),
        ({}, None),
    ],
)
def test_gpus_are_those_that_spark_assigned(
    monkeypatch: pytest.MonkeyPatch, assigned: dict[str, Any], gpus: tuple[str, ...] | None
) -> None:
    context = SimpleNamespace(resources=lambda: assigned)
    monkeypatch.setattr("pyspark.TaskContext", SimpleNamespace(get=lambda: context))
    assert resources.assigned_gpus() == gpus
