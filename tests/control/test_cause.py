"""What a feeder says of a cut link: who is believed, and that nonsense is refused."""

from __future__ import annotations

import asyncio
from http.client import HTTPConnection

import pytest

from sparkdl.control.auth import bearer
from sparkdl.control.cause import CutLink, fetch_cause, parse_cut_link
from sparkdl.control.server import Timeouts
from tests.control.rooms import LOOPBACK, SOON_S, TOKEN, Room, on_loop, room


async def report(
    here: Room, generation: int, node_id: int, token: str = TOKEN, host: str = ""
) -> str | None:
    link = CutLink(generation, node_id, host)
    return await asyncio.to_thread(fetch_cause, here.address.url, token, None, link)


def get(here: Room, path: str, token: str = TOKEN) -> int:
    connection = HTTPConnection(here.address.host, here.address.port, timeout=SOON_S)
    connection.putrequest("GET", path)
    connection.putheader("Authorization", bearer(token))
    connection.endheaders()
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.parametrize("host", ["", "10.1.2.3", "fd77::11", "h1.example"])
@on_loop
async def test_feeder_is_believed_and_told_the_cause_if_the_nodes_agent_answers(host: str) -> None:
    async with room(num_nodes=3) as here:
        here.heard.failure, here.heard.agents = "it broke", {2: "c"}
        async with here.agent("c", 2):
            assert await report(here, 1, 2, host=host) == "it broke"
            assert await here.heard.next() == ("cut", CutLink(1, 2, host or LOOPBACK))


@on_loop
async def test_feeder_is_not_believed_while_the_agent_stands_still() -> None:
    async with room(timeouts=Timeouts(ping_s=0.05), num_nodes=1) as here:
        here.heard.agents = {0: "a"}
        async with here.raw_agent("a"):  # which answers no ping
            assert await report(here, 0, 0) == ""
            while here.server._cuts:
                await asyncio.sleep(0.01)
            assert here.heard.queue.empty()
            async with here.agent("b"):
                here.heard.agents = {0: "b"}
                await report(here, 0, 0)
                assert (await here.heard.next())[0] == "cut", "as soon as it answers"


@on_loop
async def test_nodes_without_an_agent_are_the_drivers_own_matter() -> None:
    async with room(num_nodes=2) as here:
        assert await report(here, 0, 1) == ""
        assert here.heard.queue.empty()
        assert not here.server._cuts


NONSENSE = [
    "/cut/", "/cut/0", "/cut/0/0", "/cut/0/0/", "/cut/0/2/h", "/cut/-1/0/h", "/cut/0/-1/h",
    "/cut/x/0/h", "/cut/0/x/h", "/cut/1e3/0/h", "/cut/0/0/h/", "/cut/0/0/h?x=1", "/cut//0/0/h",
    "/cut/0/0/h%0aWARN", "/cut/0/0/" + "h" * 254, "/cut/" + "1" * 10 + "/0/h", "/cut/\u0660/0/h",
    "/cut/0/999999999/h", "/cut/0/0/h\n",
]  # fmt: skip


@pytest.mark.parametrize("path", NONSENSE)
def test_nonsense_is_no_link(path: str) -> None:
    assert parse_cut_link(path, 2) is None


@on_loop
async def test_nonsense_and_strangers_are_refused_and_nobody_is_told() -> None:
    async with room(num_nodes=2) as here:
        here.heard.agents = {0: "a"}
        async with here.agent("a"):
            for path in NONSENSE:
                if path.isascii() and path.isprintable():
                    assert await asyncio.to_thread(get, here, path) == 400, path
            assert await asyncio.to_thread(get, here, "/cut/0/0/h", "wrong") == 401
            with pytest.raises(OSError, match="401"):
                await report(here, 0, 0, token="wrong")
            assert here.heard.queue.empty()
