"""The relay's two ends, joined by a dict in place of a session's settings."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from pyspark import cloudpickle

from sparkdl.driver.executors import relay_task, server_task
from sparkdl.driver.executors.relay_task import Relay, Tunnel
from sparkdl.driver.executors.sessions import by_value
from tests.doubles.programs import output_of

LARGE = bytes(range(256)) * 40_000
HOST = "127.0.0.1"


class Conf(dict[str, str]):
    """Settings as both ends share them."""

    def set(self, name: str, value: str) -> None:
        self[name] = value

    def unset(self, name: str) -> None:
        del self[name]


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(1 << 16):
        writer.write(piece)
        await writer.drain()
    writer.close()


@asynccontextmanager
async def relayed(port: int) -> AsyncIterator[tuple[int, Conf]]:
    """Give the port of a relay that leads to a port here."""
    conf = Conf()
    there = asyncio.ensure_future(Relay(None, "r")._run(conf))
    while "r.port" not in conf:
        await asyncio.sleep(0.01)
    is_wanted = [True]
    here = asyncio.ensure_future(
        Tunnel(conf, "r.down", "r.up", (HOST, port)).run(lambda: bool(is_wanted))
    )
    yield int(conf["r.port"]), conf
    is_wanted.clear()
    await asyncio.wait_for(asyncio.gather(here, there), 10)


def test_connections_side_by_side_carry_their_bytes_and_both_ends_end() -> None:
    async def main() -> None:
        server = await asyncio.start_server(_echo, HOST, 0)

        async def talk(port: int, sent: bytes) -> bytes:
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(sent)
            found = await reader.readexactly(len(sent))
            writer.close()
            return found

        async with relayed(server.sockets[0].getsockname()[1]) as (port, conf):
            sent = [LARGE, *(bytes([n]) * (n + 1) for n in range(20))]
            assert await asyncio.gather(*(talk(port, each) for each in sent)) == sent
            assert max(map(len, conf.values())) < 8 << 20
        assert len(conf) <= 8, "what was read is removed"
        server.close()

    asyncio.run(asyncio.wait_for(main(), 50))


def test_connection_that_the_client_closes_or_refuses_is_closed_for_the_executor() -> None:
    async def main() -> None:
        async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"bye")
            writer.close()

        server = await asyncio.start_server(hang_up, HOST, 0)
        async with relayed(server.sockets[0].getsockname()[1]) as (port, _):
            reader, writer = await asyncio.open_connection(HOST, port)
            assert await asyncio.wait_for(reader.read(), 10) == b"bye"
            writer.close()
            server.close()
            await server.wait_closed()
            reader, writer = await asyncio.open_connection(HOST, port)
            assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()

    asyncio.run(asyncio.wait_for(main(), 50))


def test_relay_whose_client_is_gone_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_task, "SILENT_S", 0.3)
    asyncio.run(asyncio.wait_for(Relay(None, "r")._run(Conf()), 10))


def test_what_the_server_runs_is_pickled_with_all_that_it_needs() -> None:
    """`foreachBatch` pickles it; the server's Python has no sparkdl to import the rest from."""
    for module, kind in ((relay_task, Relay), (server_task, server_task.HandOver)):
        with by_value(module):
            packed = cloudpickle.dumps(kind(None, "r"))  # type: ignore[no-untyped-call]
        program = (
            "import sys, pickle; sys.modules['sparkdl'] = None\n"
            f"print(type(pickle.loads({packed!r})).__name__)"
        )
        assert output_of(sys.executable, "-c", program).strip() == kind.__name__
