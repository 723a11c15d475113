"""The two ends of one control connection, each a program on a host of its own.

Runs in: programs on hosts of the bed

    python -m tests.hosts.ends server ADDRESS HOST_TIMEOUT_S
    python -m tests.hosts.ends client URL HOST_TIMEOUT_S [ROOTS]

The server is `server`; or `talking`; or `talking-tls`, which prints the ROOTS for its client. Both
print what they see, with `at_s` of the clock that the hosts share.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from sparkdl.control.client import CoordinatorClient
from sparkdl.control.messages import FromAgent, Hello, StartFailed, Stop
from sparkdl.control.server import CoordinatorServer
from sparkdl.control.tls import Tls, Trust, new_tls

_TOKEN = "the-token"
_LEASE_S = 60.0
_TALK_S = 0.3


def tell(event: str, **values: object) -> None:
    print(json.dumps({"event": event, "at_s": time.monotonic(), **values}), flush=True)


class Listener:
    """Prints who comes and goes."""

    def __init__(self) -> None:
        self.agents: set[str] = set()

    def joined(self, hello: Hello) -> None:
        self.agents.add(hello.agent_id)
        tell("joined", host=hello.host)

    def start_failed(self, message: StartFailed) -> None:
        tell("refused", problem=message.text)

    def received(self, agent_id: str, message: FromAgent) -> None:
        tell("received")

    def left(self, agent_id: str, reason: str) -> None:
        self.agents.discard(agent_id)
        tell("left", reason=reason)

    def silent(self, hello: Hello) -> None:
        tell("silent")

    def cause(self) -> str | None:
        return ""


async def serve(address: str, host_timeout_s: float, talks: bool, tls: Tls | None) -> None:
    """Serve, and send something now and then if it `talks`."""
    listener = Listener()
    server = CoordinatorServer(_TOKEN, listener, _LEASE_S, host_timeout_s, tls=tls)
    roots = tls.trust.roots.decode() if tls else ""
    tell("listening", url=(await server.start(address, (0,))).url, roots=roots)
    while True:
        await asyncio.sleep(_TALK_S)
        for agent_id in listener.agents if talks else ():
            server.send(agent_id, Stop(1.0))


async def connect(url: str, host_timeout_s: float, roots: str) -> None:
    trust = Trust(roots.encode()) if roots else None
    client = await CoordinatorClient.connect(url, _TOKEN, _LEASE_S, host_timeout_s, trust)
    client.send(Hello(0, "", "a", "client", 1, "", "process"))
    async for _ in client.messages():
        pass
    tell("ended", reason=client.ended)


if __name__ == "__main__":
    what, where, timeout, *more = sys.argv[1:]
    if what == "client":
        asyncio.run(connect(where, float(timeout), *more))
    else:
        tls = new_tls() if what == "talking-tls" else None
        asyncio.run(serve(where, float(timeout), what != "server", tls))
