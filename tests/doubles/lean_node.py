"""The agent's end of a node's feeds, in a process that may have few descriptors.

Runs in: a process of a test

    python -m tests.doubles.lean_node DESCRIPTORS FD

`FD` is the socket to the child, which is the test. Prints where feeders find the node, then does
as standard input says, and ends with it: `hold` takes all descriptors that are left, `let go` gives
them back.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import sys

from msgspec import structs

from sparkdl.control.channel import ChildPipe
from sparkdl.control.messages import Assign, FeedProgress, Grant, Spooled
from sparkdl.feed.store.store import StoreLimits
from sparkdl.feed.transfer.endpoint import NodeFeeds
from sparkdl.feed.transfer.fetch import Peers
from sparkdl.feed.transfer.messages import FeedSpec
from tests.doubles.feeds import SOON_S, TOKEN


async def main(descriptors: int, fd: int) -> None:
    loop = asyncio.get_running_loop()

    def report(message: FeedProgress | Spooled) -> None:
        """Do what the driver does where there is one node."""
        if isinstance(message, Spooled):
            grants = tuple(
                Grant(0, n, skip, rows, ((partition, start, start + rows),))
                for n, partition, start, skip, rows, _ in map(structs.astuple, message.lots)
            )
            feeds.on_driver_message(Assign(message.feed, message.epoch, "run", grants))

    peers = Peers(0, ("worker:0",), FeedSpec("", 0, "", (), TOKEN), SOON_S)
    limits = StoreLimits(1 << 28)
    feeds = NodeFeeds(
        peers, limits, SOON_S, lambda message, fd: pipe.send(message, fd), report, print
    )
    sock = socket.socket(fileno=fd)
    pipe = ChildPipe(loop, sock, feeds.on_child_message)
    commands: asyncio.Queue[str] = asyncio.Queue()
    loop.add_reader(0, lambda: commands.put_nowait(os.read(0, 100).decode()))
    uri = feeds.listen("127.0.0.1")
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    print(uri, flush=True)
    held: list[int] = []
    while command := (await commands.get()).strip():
        if command == "hold":
            try:
                while True:
                    held.append(os.dup(0))
            except OSError:
                print(len(held), flush=True)
        while command == "let go" and held:
            os.close(held.pop())
    feeds.shut_down()
    pipe.close()
    sock.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
