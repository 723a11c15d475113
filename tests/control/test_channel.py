"""The pipe to a child: messages whole and in order, each with its own descriptor, none leaked."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.control import channel
from sparkdl.core.errors import ProtocolError
from sparkdl.core.options import Roles
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.core.world import Address, CheckpointRef, Resume, build_world
from tests.control.strategies import messages

NODES = plan_nodes(3, Roles(ps=1, chief="chief"))
START = channel.Start(
    build_world(2, {node: Address("h", 80 + node.node_id, "grpc://x") for node in NODES}),
    1,
    ClusterSpec("c", NODES),
    Resume(1, CheckpointRef("file:///c/7", 7)),
)
MESSAGE: st.SearchStrategy[channel.Local] = st.one_of(*messages(channel.Local).values())


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket_pair() as both:
        yield both


@contextmanager
def socket_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def open_fds() -> set[int]:
    return {int(name) for name in os.listdir("/dev/fd")}


def file_with(text: bytes) -> int:
    """A descriptor of an anonymous file that holds `text`."""
    with tempfile.TemporaryFile() as file:
        file.write(text)
        file.flush()
        return os.dup(file.fileno())


def content(fd: int) -> bytes:
    """Return what the file of a received descriptor holds, and close it."""
    try:
        return os.pread(fd, 1000, 0)
    finally:
        os.close(fd)


# Framing.


@given(st.lists(MESSAGE, max_size=8), st.data())
def test_messages_come_out_whole_and_in_order_wherever_the_stream_is_cut(
    messages: list[channel.Local], data: st.DataObject
) -> None:
    stream = b"".join(map(channel.frame, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    fds = list(range(1000, 1000 + sum(channel.carries_fd(message) for message in messages)))
    unframer, given_fds = channel.Unframer(), list(fds)
    out: list[tuple[channel.Local, int]] = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        out += unframer.feed(stream[start:stop], given_fds)
        given_fds = []
    assert [message for message, _ in out] == messages
    assert [fd for message, fd in out if channel.carries_fd(message)] == fds
    assert all(fd == -1 for message, fd in out if not channel.carries_fd(message))


def test_messages_come_out_byte_by_byte_as_soon_as_they_are_whole() -> None:
    unframer = channel.Unframer()
    for message, fds in ((START, [9]), (channel.Running(), []), (channel.Returned(b"x"), [])):
        *start, last = (bytes([byte]) for byte in channel.frame(message))
        assert [out for byte in start for out in unframer.feed(byte, [])] == []
        assert list(unframer.feed(last, fds)) == [(message, fds[0] if fds else -1)]


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"junk", b'{"type":"Exec"}', b'{"type":"Release","feed":"x"}', b"\xff",
     b'{"type":"Running"}{}', b'{"type":"EndMark","feed":"\xed\xa0"}', b'{"x":' + b"[" * 100_000],
    ids=lambda body: repr(body[:12]),
)  # fmt: skip
def test_a_frame_that_is_no_message_is_a_protocol_error(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a message on the pipe"):
        list(channel.Unframer().feed(len(body).to_bytes(4, "big") + body, []))


def test_a_frame_that_is_too_long_is_refused_before_it_has_come() -> None:
    with pytest.raises(ProtocolError, match="a frame of 1195725856 bytes"):
        list(channel.Unframer().feed(b"GET / HTTP/1.1\r\n", []))


@given(st.binary(max_size=40))
def test_noise_is_a_protocol_error_or_the_start_of_a_frame(noise: bytes) -> None:
    with suppress(ProtocolError):
        assert list(channel.Unframer().feed(noise, [])) == []


def test_a_message_without_its_descriptor_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="a Results came without its descriptor"):
        list(channel.Unframer().feed(channel.frame(channel.Results("x", 1)), []))


def test_descriptors_of_messages_that_never_came_whole_are_closed() -> None:
    fds = [file_with(b"x") for _ in range(3)]
    unframer = channel.Unframer()
    stream = channel.frame(channel.Results("x", 1)) + channel.frame(channel.Results("y", 1))[:-1]
    (first,) = unframer.feed(stream, fds)
    unframer.close()
    unframer.close()
    assert first == (channel.Results("x", 1), fds[0])
    assert open_fds().isdisjoint(fds[1:])
    os.close(fds[0])


# Over a real socket pair.

Pair = tuple[socket.socket, socket.socket]


def test_a_descriptor_arrives_as_one_of_the_receivers_and_the_sender_keeps_its_own(
    pair: Pair,
) -> None:
    fd = file_with(b"rows")
    channel.send(pair[0], channel.Segment("x", 0, 0, 1, 4), fd)
    assert os.pread(fd, 9, 0) == b"rows"
    os.close(fd)
    received = channel.receive(pair[1], channel.Unframer())
    assert received is not None
    ((message, theirs),) = received
    assert message == channel.Segment("x", 0, 0, 1, 4)
    assert not os.get_inheritable(theirs), "programs that user code starts do not get it"
    assert content(theirs) == b"rows"


CUTS = st.lists(st.integers(0, 10**6), max_size=3)


@given(st.lists(st.tuples(MESSAGE, CUTS, st.booleans()), max_size=10))
def test_each_message_has_its_own_descriptor_however_sends_and_reads_fall(
    script: list[tuple[channel.Local, list[int], bool]],
) -> None:
    """With a message, where to cut it, and whether to read what is there before the next."""
    before = open_fds()
    with socket_pair() as (one, other):
        unframer = channel.Unframer()
        out: list[tuple[channel.Local, int]] = []
        other.setblocking(False)

        def read() -> None:
            try:
                while (messages := channel.receive(other, unframer)) is not None:
                    out.extend(messages)
            except BlockingIOError:
                return

        for number, (message, cuts, is_read) in enumerate(script):
            if not channel.carries_fd(message):
                channel.send(one, message)
            else:
                fd = file_with(b"%d" % number)
                trickle(one, channel.frame(message), fd, cuts)
                os.close(fd)
            if is_read:
                read()
        one.close()
        read()
        assert [message for message, _ in out] == [message for message, *_ in script]
        for number, (message, fd) in enumerate(out):
            assert (content(fd) if fd >= 0 else None) == (
                b"%d" % number if channel.carries_fd(message) else None
            )
    assert open_fds() == before


def trickle(sock: socket.socket, stream: bytes, fd: int, cuts: list[int]) -> None:
    """Send a frame in pieces, as a full buffer makes it; the descriptor is with the first."""
    cuts = sorted(1 + cut % len(stream) for cut in cuts)
    first, *rest = zip([0, *cuts], [*cuts, len(stream)], strict=True)
    socket.send_fds(sock, [stream[slice(*first)]], [fd])
    for piece in rest:
        sock.sendall(stream[slice(*piece)])


def test_more_than_the_buffer_holds_goes_through_whole(pair: Pair) -> None:
    one, other = pair
    one.settimeout(20.0)  # so that one write takes no more than fits
    huge: list[channel.Local] = [
        channel.Results("x" * 3_000_000, 1),
        channel.Returned(b"y" * 3_000_000),
    ]
    fd = file_with(b"results")

    def write() -> None:
        channel.send(one, huge[0], fd)
        channel.send(one, huge[1])

    thread = threading.Thread(target=write)
    thread.start()
    unframer = channel.Unframer()
    out: list[tuple[channel.Local, int]] = []
    while len(out) < 2:
        messages = channel.receive(other, unframer)
        assert messages is not None
        out += messages
    thread.join()
    os.close(fd)
    assert [message for message, _ in out] == huge
    assert content(out[0][1]) == b"results"


def test_many_descriptors_sent_at_once_keep_their_order(pair: Pair) -> None:
    one, other = pair
    with ExitStack() as stack:
        for number in range(200):
            fd = file_with(b"%d" % number)
            stack.callback(os.close, fd)
            channel.send(one, channel.Segment("x", number, 0, 1, 1), fd)
        one.close()
        unframer = channel.Unframer()
        out: list[tuple[channel.Local, int]] = []
        while (messages := channel.receive(other, unframer)) is not None:
            out += messages
    assert [content(fd) for _, fd in out] == [b"%d" % number for number in range(200)]
