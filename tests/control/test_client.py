"""An agent's end: connects or says why not, sends in order, yields what comes until the end."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing

import pytest
from websockets.asyncio.server import serve

from sparkdl.control.client import CoordinatorClient
from sparkdl.control.messages import ChildReady, StartFailed, Stop, encode
from sparkdl.core.errors import LaunchError, ProtocolError
from tests.control.rooms import LOOPBACK, SOON_S, TOKEN, hello, on_loop, room


@on_loop
async def test_what_was_queued_before_close_arrives_in_order() -> None:
    async with room() as here:
        client = await CoordinatorClient.connect(here.address.url, TOKEN, SOON_S)
        client.send(hello("a"))
        for port in range(100):
            client.send(ChildReady(3, port))
        await client.close()
        assert await here.heard.next() == ("joined", "a")
        for port in range(100):
            assert await here.heard.next() == ("received", "a", ChildReady(3, port))
        assert (await here.heard.next())[:2] == ("left", "a")


@on_loop
async def test_task_whose_node_cannot_start_says_so_and_goes() -> None:
    async with room() as here:
        failed = StartFailed("FrameworkMissingError", "no torch")
        await CoordinatorClient.say(here.address.url, TOKEN, SOON_S, failed)
        assert await here.heard.next() == ("start failed", failed)
        with pytest.raises(LaunchError, match="cannot be reached"):
            await CoordinatorClient.say(here.address.url, "wrong", SOON_S, failed)


@on_loop
async def test_messages_end_with_the_connection_and_sending_on_is_harmless() -> None:
    async with room() as here:
        client = await CoordinatorClient.connect(here.address.url, TOKEN, SOON_S)
        client.send(hello("a"))
        await here.heard.next()
        here.server.send("a", Stop(0.0))
        stopping = asyncio.ensure_future(here.server.stop())
        assert [message async for message in client.messages()] == [Stop(0.0)]
        await stopping
        client.send(ChildReady(0, 0))
        client.send(ChildReady(0, 1))
        await client.close()


@pytest.mark.parametrize("word", ["not json", encode(ChildReady(0, 1)), b"\xff"])
@on_loop
async def test_a_coordinator_that_says_no_message_is_a_protocol_error(word: str | bytes) -> None:
    async with serve(lambda connection: connection.send(word), LOOPBACK, 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        client = await CoordinatorClient.connect(f"ws://{LOOPBACK}:{port}", TOKEN, SOON_S)
        with pytest.raises(ProtocolError, match="the coordinator sent"):
            await asyncio.wait_for(anext(client.messages()), SOON_S)
        await client.close()


@on_loop
async def test_nobody_there_is_a_launch_error_that_names_address_and_settings() -> None:
    with closing(socket.socket()) as bound:  # but not listening
        bound.bind((LOOPBACK, 0))
        url = f"ws://{LOOPBACK}:{bound.getsockname()[1]}"
        with pytest.raises(LaunchError, match=f"(?s){url}.*SPARKDL_DRIVER_HOST"):
            await CoordinatorClient.connect(url, TOKEN, SOON_S)


@on_loop
async def test_a_coordinator_that_never_answers_is_a_launch_error() -> None:
    with socket.create_server((LOOPBACK, 0)) as mute:
        url = f"ws://{LOOPBACK}:{mute.getsockname()[1]}"
        with pytest.raises(LaunchError, match=r"cannot be reached.*Timeout"):
            await CoordinatorClient.connect(url, TOKEN, 0.05)
