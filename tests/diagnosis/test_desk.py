"""Whom the driver hears, and whom it waits for no longer."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any, BinaryIO

import pytest

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError
from sparkdl.diagnosis.desk import Desk
from sparkdl.diagnosis.probe import facts_of
from tests.doubles.until import until

SOON_S = 30.0


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk(expected=2, wait_s=SOON_S)
    desk.open("127.0.0.1", (0,))
    yield desk
    desk.close()


class Task:
    """An executor's task, as far as the desk sees it."""

    def __init__(self, desk: Desk, executor: str, port: int = 0, token: str = "") -> None:
        self.sock = socket.create_connection(desk.address, SOON_S)
        self.stream: BinaryIO = self.sock.makefile("rwb")  # type: ignore[assignment]
        hello = {"executor": executor, "host": executor, "address": f"10.0.0.{port}"}
        self.hello = hello
        self.say({"token": token or desk.token, "port": port, **hello})

    def say(self, message: dict[str, Any]) -> None:
        self.stream.write(json.dumps(message).encode() + b"\n")
        self.stream.flush()

    def hear(self) -> Any:
        return json.loads(self.stream.readline() or b"null")

    def close(self) -> None:
        self.stream.close()
        self.sock.close()


def test_all_begin_when_all_are_there_and_know_of_each_other(desk: Desk) -> None:
    a, b = Task(desk, "a", 1), Task(desk, "b", 2)
    assert a.hear() == {"is_first": True, "peers": [["10.0.0.2", 2]]}
    assert b.hear() == {"is_first": True, "peers": [["10.0.0.1", 1]]}
    for task in (a, b):
        task.say(task.hello)
    assert desk.wait(Deadline.after(SOON_S))
    assert [visitor.facts is not None for visitor in desk.visitors.values()] == [True, True]
    for task in (a, b):
        assert task.hear() == {}  # they may go
        task.close()


def test_second_task_of_an_executor_has_nothing_to_do(desk: Desk) -> None:
    tasks = [Task(desk, "a"), Task(desk, "a")]
    assert sorted(task.hear()["is_first"] for task in tasks) == [False, True]
    for task in tasks:
        task.close()


def test_executor_that_goes_without_a_word_is_not_waited_for(desk: Desk) -> None:
    a, b = Task(desk, "a"), Task(desk, "b")
    assert not desk.wait(Deadline.after(0.0))
    assert a.hear()["is_first"]
    a.close()
    b.say(b.hello)
    assert desk.wait(Deadline.after(SOON_S))
    assert desk.visitors["a"].facts is None
    assert desk.visitors["b"].facts is not None
    b.close()


def test_those_that_come_are_not_kept_by_those_that_do_not(desk: Desk) -> None:
    a = Task(desk, "a")
    assert until(lambda: desk.tasks)
    desk.begin()  # as after `wait_s`, or when the job has ended
    assert a.hear()["is_first"]
    a.say(a.hello)
    assert desk.wait(Deadline.after(SOON_S))
    assert desk.tasks == 1
    a.close()


def test_executor_that_comes_late_is_looked_at_too(desk: Desk) -> None:
    desk.begin()
    assert desk.wait(Deadline.after(SOON_S)), "nobody was there"
    for executor in ("a", "b"):  # the last one of all that were expected
        late = Task(desk, executor, 1)
        assert late.hear() == {"is_first": True, "peers": []}
        late.say(late.hello)
        assert late.hear() == {}
        late.close()
    assert [visitor.facts is not None for visitor in desk.visitors.values()] == [True, True]


def test_stranger_is_not_heard(desk: Desk) -> None:
    stranger = Task(desk, "x", token="wrong")
    assert stranger.hear() is None
    stranger.close()
    assert not desk.visitors


def test_own_task_tells_versions(desk: Desk) -> None:
    order = {
        "host": "127.0.0.1",
        "port": desk.address[1],
        "token": desk.token,
        "wait_s": SOON_S,
        "limit_s": SOON_S,
        "looks": {},
    }
    desk.expected = 1
    found = facts_of(order)
    (visitor,) = desk.visitors.values()
    assert visitor.facts is not None
    assert visitor.facts.versions["sparkdl"]
    assert found["address"] == "127.0.0.1"
    assert "unreachable" not in found


def test_task_that_does_not_reach_the_driver_looks_around_all_the_same() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    order = {"host": "127.0.0.1", "port": port, "token": "t", "wait_s": 1.0, "limit_s": 1.0}
    found = facts_of({**order, "looks": {}})
    assert "refused" in found["unreachable"]
    assert found["versions"]["Python"]


def test_place_where_nobody_can_listen_is_an_error_of_the_launch() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.77, any free port"):
        Desk(1, 1.0).open("192.0.2.77", (0,))
