"""Descriptors reach the agent on one machine, from those who know the token, and none stays."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sparkdl.control.descriptors import FdReceiver, FdSender
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ProtocolError
from sparkdl.feed.store.segment import read_segment, write_segment
from tests.doubles.feeds import SOON_S, TOKEN, Running, numbers
from tests.doubles.limits import no_descriptors_left
from tests.doubles.until import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's own")
BATCH = numbers(0, 10)


@contextmanager
def serving(**options: float) -> Iterator[FdReceiver]:
    server = FdReceiver(TOKEN, **options)
    yield server
    server.close()


@contextmanager
def connected(server: FdReceiver, token: str = TOKEN) -> Iterator[FdSender]:
    handoff = FdSender.connect(server.name, token)
    assert handoff is not None
    yield handoff
    handoff.close()


def send(handoff: FdSender) -> str:
    fd, _ = write_segment(BATCH)
    try:
        return handoff.send(fd)
    finally:
        os.close(fd)


def soon() -> Deadline:
    return Deadline.after(SOON_S)


def segments() -> int:
    names = (f"/dev/fd/{name}" for name in os.listdir("/dev/fd"))
    return sum("sparkdl-segment" in os.readlink(n) for n in names if os.path.lexists(n))


def test_descriptors_come_under_their_keys_in_any_order() -> None:
    with serving() as server, connected(server) as one, connected(server) as other:
        keys = [send(handoff) for handoff in (one, one, other)]
        assert len(set(keys)) == 3
        for key in reversed(keys):
            fd = server.wait_fd(key, soon())
            assert read_segment(fd).equals(BATCH)
            os.close(fd)
        assert segments() == 0


def test_descriptor_for_which_there_is_no_room_is_known_to_be_lost() -> None:
    with serving() as server, connected(server) as handoff:
        fd, _ = write_segment(BATCH)
        with no_descriptors_left():
            key = handoff.send(fd)
            with pytest.raises(OSError, match="Too many open files"):
                server.wait_fd(key, soon())
        os.close(fd)
        os.close(server.wait_fd(send(handoff), soon()))  # the connection is still there


def test_wrong_token_hands_over_nothing() -> None:
    with serving() as server:
        assert FdSender.connect(server.name, "another token") is None


def test_stranger_that_says_nothing_is_hung_up_on() -> None:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with serving(token_timeout_s=0.05) as server, stranger as sock:
        sock.settimeout(SOON_S)
        sock.connect(f"\0{server.name}")
        assert sock.recv(1) == b""


def test_feeder_that_goes_leaves_no_descriptor() -> None:
    with serving() as server:
        with connected(server) as handoff:
            kept, left = send(handoff), send(handoff)
            fd = server.wait_fd(kept, soon())
        assert read_segment(fd).equals(BATCH)
        os.close(fd)
        for thread in threading.enumerate():
            if thread.name == "sparkdl-fds-feeder":
                thread.join(SOON_S)
        with pytest.raises(ProtocolError):
            server.wait_fd(left, Deadline.after(0.01))
        assert segments() == 0


def test_closed_server_ends_waits_and_connections() -> None:
    with serving() as server, connected(server) as handoff:
        waiting = Running(lambda: server.wait_fd("none", soon()))
        send(handoff)
        server.close()
        with pytest.raises(ProtocolError):
            waiting.result()
        assert FdSender.connect(server.name, TOKEN) is None
    assert until(lambda: not segments()), "its own thread closes what it was about to keep"


def test_node_on_another_machine_is_not_there() -> None:
    assert FdSender.connect("sparkdl-of-another-machine", TOKEN) is None
    assert FdSender.connect("", TOKEN) is None
