"""The agent's end of the pipe keeps order, never blocks, and owns every descriptor."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from sparkdl.control import channel as ch
from sparkdl.control.messages import ChildReturned, EpochEnd
from tests.doubles.feeds import SOON_S
from tests.doubles.limits import no_descriptors_left


class Agent:
    """A pipe on a loop that a test turns by hand."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.ours, self.child_end = socket.socketpair()
        self.heard: list[tuple[ch.Local, int]] = []
        self.pipe = ch.ChildPipe(self.loop, self.ours, lambda *heard: self.heard.append(heard))
        self.child_end.settimeout(SOON_S)

    def turn(self) -> None:
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()

    def turn_until(self, is_done: Callable[[], bool]) -> None:
        late = self.loop.call_later(SOON_S, self.loop.stop)

        def look() -> None:
            self.loop.stop() if is_done() else self.loop.call_later(0.001, look)

        look()
        self.loop.run_forever()
        late.cancel()
        assert is_done()

    @property
    def messages(self) -> list[ch.Local]:
        return [message for message, _ in self.heard]


@contextmanager
def opened() -> Iterator[Agent]:
    agent = Agent()
    try:
        yield agent
    finally:
        agent.pipe.close()
        agent.loop.close()
        agent.ours.close()
        agent.child_end.close()


def memory(text: bytes = b"") -> int:
    fd = os.memfd_create("test")
    os.write(fd, text)
    return fd


def content(fd: int) -> bytes:
    try:
        return os.pread(fd, 100, 0)
    finally:
        os.close(fd)


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def segment(number: int, feed: str = "input") -> ch.Segment:
    return ch.Segment(feed, number, 0, 1, 1)


def test_more_than_the_socket_holds_is_queued_and_arrives_whole_and_in_order() -> None:
    with opened() as agent:
        large = EpochEnd("x" * 3_000_000, 0, {})
        fds = [memory(b"%d" % number) for number in range(40)]
        agent.pipe.send(large)
        for number, fd in enumerate(fds):
            agent.pipe.send(segment(number, "y" * 20_000), fd)
        assert all(is_open(fd) for fd in fds)  # queued, for nobody reads yet
        found: list[tuple[ch.Local, int]] = []
        unframer = ch.Unframer()
        agent.child_end.setblocking(False)

        def is_whole() -> bool:
            with suppress(BlockingIOError):
                found.extend(ch.receive(agent.child_end, unframer) or [])
            return len(found) == 41

        agent.turn_until(is_whole)
        assert found[0] == (large, -1)
        assert [m.number for m, _ in found if isinstance(m, ch.Segment)] == list(range(40))
        assert [content(fd) for _, fd in found[1:]] == [b"%d" % n for n in range(40)]
        assert not any(is_open(fd) for fd in fds)


def test_closed_pipe_closes_what_is_queued_and_what_comes_later() -> None:
    with opened() as agent:
        agent.pipe.send(EpochEnd("x" * 3_000_000, 0, {}))
        queued, later = memory(), memory()
        agent.pipe.send(segment(0), queued)
        agent.pipe.close()
        assert not is_open(queued)
        agent.pipe.send(segment(1), later)
        agent.pipe.send(ch.EndMark("input"))
        assert not is_open(later)


def test_last_words_are_heard_though_rows_for_the_child_can_no_longer_be_sent() -> None:
    """A child returns while feeders still bring rows."""
    with opened() as agent:
        ch.send(agent.child_end, ChildReturned(0, b"result"))
        agent.child_end.close()
        fds = [memory(), memory()]
        for number, fd in enumerate(fds):
            agent.pipe.send(segment(number), fd)
        assert not any(is_open(fd) for fd in fds)
        agent.turn()
        assert agent.messages == [ChildReturned(0, b"result")]


def test_descriptor_of_a_message_that_never_came_whole_is_closed() -> None:
    before = set(os.listdir("/dev/fd"))
    with opened() as agent:
        fd = memory()
        socket.send_fds(agent.child_end, [ch.frame(ch.Results("0.a", 1))[:-3]], [fd])
        os.close(fd)
        agent.turn()
        assert agent.heard == []
    assert set(os.listdir("/dev/fd")) == before


def test_child_that_says_no_message_has_failed_and_is_hung_up_on() -> None:
    """User code has written to the pipe, perhaps: the number of a descriptor that it has closed."""
    with opened() as agent:
        agent.child_end.sendall(ch.frame(ch.Beat()) + b"\0\0\0\5hello" + ch.frame(ch.EndMark("x")))
        agent.turn_until(lambda: len(agent.heard) == 2)
        first, failed = agent.messages
        assert first == ch.Beat()
        assert isinstance(failed, ch.Raised)
        assert failed.failure.message.startswith("ProtocolError: not a message on the pipe")
        assert agent.child_end.recv(1) == b""  # upon which a child ends itself
        agent.pipe.send(ch.EndMark("x"))
        agent.pipe.close()
        assert len(agent.heard) == 2


def test_results_for_which_there_is_no_descriptor_are_heard_without() -> None:
    with opened() as agent:
        fd = memory()
        ch.send(agent.child_end, ch.Results("p", 1), fd)
        with no_descriptors_left():
            agent.turn()
        os.close(fd)
        assert agent.heard == [(ch.Results("p", 1), -1)]
