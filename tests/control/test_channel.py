"""The pipe to a child: messages whole and in order, each with its own descriptor, none leaked."""

from __future__ import annotations

import os
import socket
import tempfile

import pytest
from hypothesis import given, strategies as st

from sparkdl.control import channel
from sparkdl.core.errors import ProtocolError
from tests.control.strategies import messages
from tests.control.test_pipe import content

MESSAGE: st.SearchStrategy[channel.Local] = st.one_of(*messages(channel.Local).values())


def open_fds() -> set[int]:
    return {int(name) for name in os.listdir("/dev/fd")}


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


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"junk", b'{"type":"Exec"}', b'{"type":"Release","feed":"x"}', b"\xff",
     b'{"type":"Beat"}{}', b'{"type":"EndMark","feed":"\xed\xa0"}', b'{"x":' + b"[" * 100_000],
    ids=lambda body: repr(body[:12]),
)  # fmt: skip
def test_a_frame_that_is_no_message_is_a_protocol_error(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a message on the pipe"):
        list(channel.Unframer().feed(len(body).to_bytes(4, "big") + body, []))


def test_a_frame_that_is_too_long_is_refused_before_it_has_come() -> None:
    with pytest.raises(ProtocolError, match="a frame of 1195725856 bytes"):
        list(channel.Unframer().feed(b"GET / HTTP/1.1\r\n", []))


def test_a_message_without_its_descriptor_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="a Results came without its descriptor"):
        list(channel.Unframer().feed(channel.frame(channel.Results("x", 1)), []))


CUTS = st.lists(st.integers(0, 10**6), max_size=3)


@given(st.lists(st.tuples(MESSAGE, CUTS, st.booleans()), max_size=10))
def test_each_message_has_its_own_descriptor_however_sends_and_reads_fall(
    script: list[tuple[channel.Local, list[int], bool]],
) -> None:
    """With a message, where to cut it, and whether to read what is there before the next."""
    before = open_fds()
    one, other = socket.socketpair()
    with one, other:
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
                with tempfile.TemporaryFile(buffering=0) as file:
                    file.write(b"%d" % number)
                    trickle(one, channel.frame(message), file.fileno(), cuts)
            if is_read:
                read()
        one.close()
        read()
        assert [message for message, _ in out] == [message for message, *_ in script]
        for number, (message, fd) in enumerate(out):
            assert fd < 0 or not os.get_inheritable(fd), "programs of user code do not get it"
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
