"""No bytes on the coordinator's port, and no order of messages, make it fall over."""

from __future__ import annotations

import asyncio
import random
import typing
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

import msgspec
import pytest
from websockets.frames import Frame, Opcode

from sparkdl.control.auth import bearer
from sparkdl.control.messages import ChildReady, FromAgent, encode
from tests.control.rooms import SOON_S, TOKEN, Room, handshake, hello, room, text_frame
from tests.fuzz.inputs import SEED, altered, damaged, example_of, share

MESSAGES = [msgspec.json.encode(example_of(kind)) for kind in typing.get_args(FromAgent)]
DOOR = handshake(bearer(TOKEN))
GOODBYE = Frame(Opcode.CLOSE, b"").serialize(mask=True)
SIDE_BY_SIDE = 50
_ANSWER_S = 0.05
"""For what gets no answer, as it is half a request; the connection is ended then."""


def hello_of(number: int) -> bytes:
    return text_frame(encode(hello(f"agent {number}")).encode())


WHOLE = [
    DOOR + hello_of(0) + text_frame(MESSAGES[1]) + GOODBYE,
    DOOR + hello_of(1) + text_frame(MESSAGES[2]) * 3,
    handshake() + hello_of(2),
    b"GET /cause HTTP/1.1\r\n" + DOOR.partition(b"\r\n")[2],
]


def scripts(count: int) -> Iterator[bytes]:
    """Yield what connections say: a few messages in any order, after a Hello or before."""
    rng = random.Random(f"{SEED} scripts")
    said = altered(MESSAGES, 4 * count, "said")
    for number in range(count):
        frames = [text_frame(next(said)) for _ in range(rng.randrange(4))]
        frames.insert(rng.choice((0, 0, 0, len(frames))), hello_of(number))
        yield DOOR + b"".join(frames) + GOODBYE


async def say(here: Room, data: bytes) -> None:
    """Connect, say it, and wait until the server has hung up.

    What follows a request waits for its answer: no client says goodbye before it has one.
    """
    request, end, rest = data.partition(b"\r\n\r\n")
    async with here.raw() as (reader, writer):
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            writer.write(request + end)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _ANSWER_S)
            writer.write(rest)
            writer.write_eof()
            await asyncio.wait_for(reader.read(), SOON_S)


async def check_works(here: Room) -> int:
    """All that have joined have left; a good agent joins and speaks. Return how much was said."""
    joined: set[str] = set()
    heard = here.heard.queue.qsize()
    while not here.heard.queue.empty() or joined:
        kind, who, *_ = await here.heard.next()
        if kind == "joined":
            assert who not in joined
            joined.add(who)
        elif kind in ("received", "left"):
            assert who in joined
            joined -= {who} if kind == "left" else set()
    async with here.agent("good") as good:
        await good.send(encode(ChildReady(0, 1)))
        assert await here.heard.next() == ("received", "good", ChildReady(0, 1))
    return heard


@pytest.mark.parametrize("kind", ["bytes", "messages"])
def test_any_connection_harms_nobody(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    count = share(0.005)
    said = damaged(WHOLE, count, "bytes") if kind == "bytes" else scripts(count)

    async def scene() -> None:
        async with room() as here:
            while group := [say(here, data) for data in islice(said, SIDE_BY_SIDE)]:
                await asyncio.gather(*group)
            assert await check_works(here) > count / 20

    with caplog.at_level("WARNING"):
        asyncio.run(scene())
    assert [record.exc_info for record in caplog.records if record.exc_info] == []
