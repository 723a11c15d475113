"""What members say reaches all of them, from nobody else; and who waits for one that has gone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from sparkdl.collectives.announcer import Announcer

KEY = b"the members' secret"
SOON_S = 20.0


def connected(size: int, timeout_s: float = SOON_S, keys: dict[int, bytes] | None = None) -> Any:
    """Return a call that connects a member, and the store of all."""
    from torch.distributed import HashStore

    store = HashStore()
    store.set_timeout(timedelta(seconds=SOON_S))

    def connect(rank: int) -> Announcer:
        key = (keys or {}).get(rank, KEY)
        return Announcer(rank, size, store, "localhost", key, timeout_s)

    return connect, store


class Late:
    """The store of rank 3, which asks last for the address of rank 0."""

    def __init__(self, store: Any, has_left: threading.Event) -> None:
        self._store, self._has_left = store, has_left
        self.set = store.set

    def get(self, key: str) -> bytes:
        assert not self._has_left.wait(0.3), "the others did not wait for rank 3"
        return bytes(self._store.get(key))


@pytest.mark.torch
def test_nobody_leaves_before_all_are_connected() -> None:
    has_left = threading.Event()
    _, store = connected(4)

    def connect_and_leave(rank: int) -> None:
        own = Late(store, has_left) if rank == 3 else store
        Announcer(rank, 4, own, "localhost", KEY, SOON_S).close()
        has_left.set()

    assert at_once([partial(connect_and_leave, rank) for rank in range(4)]) == [None] * 4


@contextmanager
def members(size: int, timeout_s: float = SOON_S) -> Iterator[list[Announcer]]:
    connect, _ = connected(size, timeout_s)
    with ExitStack() as ends, ThreadPoolExecutor(size) as pool:
        found = [ends.enter_context(closing(each)) for each in pool.map(connect, range(size))]
        yield found


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """Return what the calls return, or raise, each in a thread of its own."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except OSError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


@pytest.mark.torch
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_all_hear_what_each_has_said_in_each_of_many_exchanges(size: int) -> None:
    with members(size) as all_members:

        def talk(rank: int) -> list[list[bytes]]:
            return [all_members[rank].exchange(said[turn][rank]) for turn in range(50)]

        # Some say nothing, others more than a packet holds.
        said = [
            [bytes([rank, turn] * (turn * rank * 7)) for rank in range(size)] for turn in range(50)
        ]

        heard = at_once([partial(talk, rank) for rank in range(size)])
    assert heard == [said] * size


@pytest.mark.torch
def test_all_learn_at_once_that_a_member_has_gone() -> None:
    with members(5) as all_members:
        all_members[2].close()
        errors = at_once([partial(each.exchange, b"x") for each in all_members])
        again = at_once([partial(each.exchange, b"x") for each in all_members])
    for rank, error in enumerate(errors):
        if rank != 2:
            assert "the connection with rank" in str(error), error
            assert "closed by peer" in str(error)
    assert all("the connections were closed" in str(error) for error in again)


@pytest.mark.torch
def test_members_that_are_out_of_step_take_nothing_for_something_else() -> None:
    with members(3) as all_members:
        calls = [partial(each.exchange, b"12345678") for each in all_members[:2]]
        errors = at_once([*calls, partial(all_members[2].exchange, b"12345678", True)])
    assert all(isinstance(error, OSError) for error in errors), errors
    assert any("has not finished what all had agreed on" in str(error) for error in errors)


@pytest.mark.torch
def test_waiting_for_a_member_ends_in_time() -> None:
    with members(3, timeout_s=0.5) as all_members:
        errors = at_once([partial(each.exchange, b"x") for each in all_members[:2]])
    assert any(isinstance(error, TimeoutError) for error in errors), errors
    assert all(isinstance(error, OSError) for error in errors), errors


@pytest.mark.torch
def test_strangers_are_not_let_in_and_keep_nobody_waiting_for_long() -> None:
    connect, store = connected(2)
    with ThreadPoolExecutor(1) as pool, ExitStack() as ends:
        first = pool.submit(connect, 0)
        _, port, _ = store.get("announcer").decode().split(" ", 2)
        ends.enter_context(socket.create_connection(("localhost", int(port)), SOON_S))
        for nonsense in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(36), b"\1\0\0\0" + bytes(32)):
            with socket.create_connection(("localhost", int(port)), SOON_S) as stranger:
                stranger.sendall(nonsense)
        second = ends.enter_context(closing(connect(1)))
        both = [ends.enter_context(closing(first.result(SOON_S))), second]
        assert at_once([partial(both[0].exchange, b"a"), partial(both[1].exchange, b"b")]) == [
            [b"a", b"b"],
            [b"a", b"b"],
        ]


@pytest.mark.torch
def test_member_with_another_key_is_a_stranger() -> None:
    connect, _ = connected(2, timeout_s=0.5, keys={1: b"another"})
    errors = at_once([partial(connect, 0), partial(connect, 1)])
    assert isinstance(errors[0], TimeoutError), errors
    assert isinstance(errors[1], OSError), errors
