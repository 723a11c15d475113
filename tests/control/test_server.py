"""The coordinator's door: who is let in, what is handed on, and no peer harms another."""

from __future__ import annotations

import asyncio
import random
import re
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import pytest
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed
from websockets.frames import Opcode

from sparkdl.control import messages as msg
from sparkdl.control.auth import bearer
from sparkdl.control.server import MAX_STRANGERS, CoordinatorServer, ServerAddress
from tests.control import rooms
from tests.control.rooms import LOOPBACK, SOON_S, TOKEN, Heard, Room, hello, on_loop, receive, room

Stalled = Callable[[Room], AbstractAsyncContextManager[rooms.Peer]]


async def check_talks(here: Room, agent: ClientConnection, agent_id: str = "good") -> None:
    await agent.send(msg.encode(msg.ChildReady(0, 8080)))
    assert await here.heard.next() == ("received", agent_id, msg.ChildReady(0, 8080))
    here.server.send(agent_id, msg.NewRound(1))
    assert await receive(agent) == msg.NewRound(1)


async def check_works(here: Room) -> None:
    async with here.agent("good") as good:
        await check_talks(here, good)
    assert await here.heard.next() == ("left", "good", "its connection closed")


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """Wait until the server has closed the connection; return what it had to say."""
    try:
        return await asyncio.wait_for(reader.read(), SOON_S)
    except ConnectionError:
        return b""


@pytest.mark.parametrize(
    "authorizations",
    [(), ("Bearer \u00ff",), ("Bearer no", f"Bearer {TOKEN}"), (f"Bearer {TOKEN}",) * 2],
)
@on_loop
async def test_without_the_token_the_answer_is_401_only(authorizations: tuple[str, ...]) -> None:
    frame = rooms.text_frame(msg.encode(hello()).encode())
    async with room() as here:
        async with here.raw(rooms.handshake(*authorizations), frame) as (reader, _):
            answer = await read_all(reader)
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert answer.endswith(b"\r\n\r\nwrong or missing token\n")
        assert here.heard.queue.empty()
        await check_works(here)


@pytest.mark.parametrize(
    "first",
    [msg.encode(msg.ChildReady(0, 1)), "not json", b"\xff\xfe", 2 * msg.encode(hello())],
    ids=lambda first: repr(first[:12]),
)
@on_loop
async def test_peer_that_does_not_begin_with_hello_is_dropped_silently(first: str | bytes) -> None:
    async with room() as here:
        async with rooms.authorized(here.address.url) as stranger:
            with pytest.raises(ConnectionClosed, match=r"1008.*a Hello was expected"):
                await rooms.speak(stranger, first)
        assert here.heard.queue.empty()
        await check_works(here)


@on_loop
async def test_a_second_agent_of_the_same_name_is_refused_and_the_first_stays() -> None:
    async with room() as here, here.agent("twin") as first:
        async with rooms.authorized(here.address.url) as second:
            await second.send(msg.encode(hello("twin")))
            with pytest.raises(ConnectionClosed, match="1008"):
                await asyncio.wait_for(second.recv(), SOON_S)
        await check_talks(here, first, "twin")


STALLED: dict[str, Stalled] = {
    "connects only": lambda here: here.raw(),
    "half a handshake": lambda here: here.raw(rooms.handshake(bearer(TOKEN))[:60]),
    "no hello": lambda here: here.raw(rooms.handshake(bearer(TOKEN))),
    "half a hello": lambda here: here.raw(
        rooms.handshake(bearer(TOKEN)), rooms.text_frame(msg.encode(hello("slow")).encode())[:20]
    ),
}


@on_loop
async def test_stalled_peers_disturb_nobody_and_do_not_hold_up_the_stop() -> None:
    async with (
        room(hello_s=10 * SOON_S, close_s=rooms.ENDS_SOON_S) as here,
        AsyncExitStack() as stack,
    ):
        for stall in STALLED.values():
            await stack.enter_async_context(stall(here))
        await check_works(here)
        await asyncio.wait_for(here.server.stop(), SOON_S)
        assert here.heard.queue.empty()


@on_loop
async def test_a_peer_that_never_says_hello_is_dropped() -> None:
    async with room(hello_s=1.0) as here:
        async with rooms.authorized(here.address.url) as silent:
            with pytest.raises(ConnectionClosed, match="1008") as closed:
                await asyncio.wait_for(silent.recv(), SOON_S)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.reason == "a Hello was expected"
        assert here.heard.queue.empty()


@on_loop
async def test_of_many_strangers_the_oldest_go_first_and_agents_come_in() -> None:
    async with room() as here, AsyncExitStack() as stack, here.agent("before"):
        many = [await stack.enter_async_context(here.raw()) for _ in range(MAX_STRANGERS + 9)]
        async with here.agent("after"):
            for reader, _ in many[:9]:
                assert await read_all(reader) == b""
            for reader, _ in many[11:]:
                assert not reader.at_eof()
        assert (await here.heard.next())[:2] == ("left", "after")


@pytest.mark.parametrize("said", ["not json", msg.encode(msg.Stop(0.0)), b"\x00\xff"])
@on_loop
async def test_agent_that_says_no_message_leaves_with_reason_others_stay(said: str | bytes) -> None:
    async with room() as here, here.agent("good", 1) as good:
        async with here.agent("bad") as bad:
            with pytest.raises(ConnectionClosed, match=r"1008.*not a message"):
                await rooms.speak(bad, said)
        kind, agent_id, why = await here.heard.next()
        assert (kind, agent_id) == ("left", "bad")
        assert re.match("an agent sent an invalid message", why)
        await check_talks(here, good)


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (rooms.text_frame(b'{"type":"\xff"}'), "1007"),  # no UTF-8
        (b"\x81\xff" + (msg.MAX_MESSAGE_NBYTES + 1).to_bytes(8, "big") + b"mask", "1009.*too big"),
        (b"\x83\x80mask", "1002"),  # no known opcode
    ],
    ids=["no UTF-8", "too big", "no opcode"],
)
@on_loop
async def test_frame_against_the_rules_breaks_only_its_connection(frame: bytes, why: str) -> None:
    async with room(close_s=rooms.ENDS_SOON_S) as here, here.agent("good") as good:
        async with here.raw_agent("bad") as (reader, writer):
            writer.write(frame)
            assert await reader.read(1) == b"\x88"  # a close frame
        kind, agent_id, reason = await here.heard.next()
        assert (kind, agent_id) == ("left", "bad")
        assert re.match(f"its connection broke: .*{why}", reason)
        await check_talks(here, good)


@on_loop
async def test_an_agent_that_says_nothing_and_does_not_ping_has_left() -> None:
    async with room(lease_s=0.2, close_s=rooms.ENDS_SOON_S) as here, here.raw_agent("frozen"):
        kind, agent_id, reason = await here.heard.next()
        assert (kind, agent_id) == ("left", "frozen")
        assert re.match(r"it has sent no data for \d", reason)


@on_loop
async def test_messages_stay_in_order_for_an_agent_that_reads_late() -> None:
    async with room() as here, here.agent("late") as late:
        messages = [msg.FeedEnd((str(i), "x" * 200_000)) for i in range(40)]
        for message in messages:
            here.server.send("late", message)
        here.server.send("late", msg.StopChild(1))
        assert [await receive(late) for _ in range(41)] == [*messages, msg.StopChild(1)]


@on_loop
async def test_stop_ends_every_connection_and_the_port() -> None:
    async with room() as here, here.agent("a") as one, here.agent("b") as other:
        await asyncio.wait_for(here.server.stop(), SOON_S)
        assert {(await here.heard.next())[:2] for _ in "ab"} == {("left", "a"), ("left", "b")}
        for agent in (one, other):
            with pytest.raises(ConnectionClosed, match="1001"):
                await asyncio.wait_for(agent.recv(), SOON_S)
        here.server.send("a", msg.Stop(0.0))
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(here.address.host, here.address.port)


@on_loop
async def test_the_first_free_port_is_taken() -> None:
    server = CoordinatorServer(TOKEN, Heard(), 60.0)
    held, free, other = (socket.create_server((LOOPBACK, 0)) for _ in range(3))
    with held, free, other:
        taken, wanted, unused = (sock.getsockname()[1] for sock in (held, free, other))
        free.close()
        other.close()
        address = await server.start(LOOPBACK, (taken, taken, wanted, unused))
        assert address == ServerAddress(LOOPBACK, wanted)
        await server.stop()


@pytest.mark.skipif(not rooms.has_ipv6(), reason="this machine has no ::1")
@on_loop
async def test_the_server_is_reached_over_ip_version_6() -> None:
    heard = Heard()
    server = CoordinatorServer(TOKEN, heard, 60.0)
    address = await server.start("::1", (0,))
    try:
        await check_works(Room(server, address, heard))
    finally:
        await server.stop()


@on_loop
async def test_pings_leave_the_random_numbers_of_the_program_alone() -> None:
    async with room(lease_s=0.4) as here, here.raw_agent("a") as (reader, _):
        before = random.getstate()
        first, _ = await asyncio.wait_for(reader.readexactly(2), SOON_S)
        assert first & 0x0F == Opcode.PING
        assert random.getstate() == before
