"""Many agents in one process, as far as the coordinator can tell: real connections, no nodes.

It is told what to do by lines on standard input: `go`, `report SECONDS`, `reset COUNT`, `count`. It
parses no more than it must, so that the driver is what is measured.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import socket
import struct
import time
from base64 import b64encode
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from harness import claim_stdout, write
from websockets.frames import Frame, Opcode

from sparkdl.control.auth import bearer
from sparkdl.control.lease import agent_keep_alive
from sparkdl.control.messages import (
    ChildReady,
    ChildRunning,
    FeedProgress,
    FromAgent,
    Hello,
    encode,
)
from sparkdl.control.rows import FeedCount, ReadCounts
from sparkdl.core.options import Recovery
from sparkdl.core.settings import Settings

TICK_S = 0.02
_PER_HOST = 8
_HEAD_NBYTES = 64


def framed(message: FromAgent) -> bytes:
    """Return the bytes of a message."""
    return Frame(Opcode.TEXT, encode(message).encode()).serialize(mask=True)


@dataclass(eq=False)
class Agent:
    """One connection. What comes is cut into frames; of long ones only the beginning is kept."""

    node_id: int
    sock: socket.socket
    is_open: bool = False
    rest: bytes = b""
    skip: int = 0
    steps: int = 0
    kept: list[bytes] = field(default_factory=list)
    """What has come of the first agent, whole, until it has begun."""


class Agents:
    """All agents of the process, on one `epoll`."""

    def __init__(self, url: str, token: str, first: int, last: int) -> None:
        host, _, port = url.rpartition("//")[2].rpartition(":")
        self._address = host, int(port)
        key = b64encode(random.randbytes(16)).decode()
        self._handshake = (
            f"GET / HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n"
            f"Authorization: {bearer(token)}\r\n\r\n"
        ).encode()
        self._ids = range(first, last)
        self._epoll = select.epoll()
        self._agents: dict[int, Agent] = {}
        self._turns: deque[Agent] = deque()
        self._pings: deque[Agent] = deque()
        self._lines = claim_stdout()
        self.nbytes = 0
        self.begun = self.again = 0
        self.again_s = 0.0
        self._period_s = 0.0

    def serve(self) -> None:
        """Do what standard input says, until it ends."""
        self._epoll.register(0, select.EPOLLIN)
        ping_s = agent_keep_alive(Settings.lease_s, Recovery.host_timeout_s).ping_interval
        last_s = time.monotonic()
        due = {"report": 0.0, "ping": 0.0}
        while True:
            for fd, event in self._epoll.poll(TICK_S):
                if fd == 0:
                    if not (line := os.read(0, 4096).decode()):
                        return
                    for command in line.splitlines():
                        self._do(*command.split())
                elif agent := self._agents.get(fd):
                    self._serve(agent, event)
            now_s = time.monotonic()
            for what, period_s, turns, act in (
                ("report", self._period_s, self._turns, self._report),
                ("ping", ping_s, self._pings, self._ping),
            ):
                due[what] += len(turns) * (now_s - last_s) / period_s if period_s else 0.0
                count = min(len(turns), int(due[what]))
                due[what] -= int(due[what])
                self._each(turns, count, act)
            last_s = now_s

    def _do(self, command: str, argument: str = "") -> None:
        if command == "go":
            for node_id in self._ids:
                sock = socket.socket()
                sock.setblocking(False)
                self._agents[sock.fileno()] = Agent(node_id, sock)
                sock.connect_ex(self._address)
                self._epoll.register(sock, select.EPOLLOUT)
        elif command == "report":
            self._period_s = float(argument)
        elif command == "reset":
            lost = list(self._agents.values())[-int(argument) :]
            start_s = time.monotonic()
            for agent in lost:
                linger = struct.pack("ii", 1, 0)
                agent.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self._drop(agent)
            self._say("reset", since_s=start_s)
        elif command == "count":
            self._say("count", nbytes=self.nbytes, again=self.again, again_s=self.again_s)

    def _each(self, turns: deque[Agent], count: int, act: Callable[[Agent], None]) -> None:
        for _ in range(count):
            agent = turns.popleft()
            if agent.is_open:
                act(agent)
                turns.append(agent)

    def _report(self, agent: Agent) -> None:
        agent.steps += 1
        rows = agent.steps * 256
        count = FeedCount(
            "input",
            rows + 4096,
            ReadCounts(rows, steps=agent.steps),
            epoch_rows=rows + 4096,
            began=0,
        )
        self._send(agent, framed(FeedProgress(0, (count,))))

    def _ping(self, agent: Agent) -> None:
        self._send(agent, Frame(Opcode.PING, b"ping").serialize(mask=True))

    def _send(self, agent: Agent, data: bytes) -> None:
        self.nbytes += len(data)
        try:
            agent.sock.sendall(data)
        except OSError:
            self._drop(agent)

    def _serve(self, agent: Agent, event: int) -> None:
        if event & select.EPOLLOUT:  # it is connected
            self._epoll.modify(agent.sock, select.EPOLLIN)
            self._send(agent, self._handshake)
            return
        try:
            data = agent.sock.recv(1 << 18)
        except OSError:
            data = b""
        self.nbytes += len(data)
        if not data:
            self._drop(agent)
        elif not agent.is_open:
            agent.rest += data
            if b"\r\n\r\n" in agent.rest:
                head, _, agent.rest = agent.rest.partition(b"\r\n\r\n")
                if b" 101 " not in head:
                    raise RuntimeError(head.decode())
                self._join(agent)
        else:
            self._take(agent, data)

    def _join(self, agent: Agent) -> None:
        agent.is_open = True
        self._turns.append(agent)
        self._pings.append(agent)
        node = agent.node_id
        host = f"10.{node // _PER_HOST >> 8}.{node // _PER_HOST & 255}.17"
        uri = f"grpc://{host}:{random.randrange(32768, 61000)}"
        hello = Hello(node, "", f"{node:032x}", host, 1000 + node, uri, "task")
        child = ChildReady(0, random.randrange(32768, 61000))
        self._send(agent, framed(hello) + framed(child))
        self._take(agent, b"")

    def _take(self, agent: Agent, data: bytes) -> None:
        if agent.node_id == self._ids[0] and not self.begun:
            agent.kept.append(data)
        taken = min(agent.skip, len(data))
        agent.skip -= taken
        data = agent.rest + data[taken:] if agent.rest else data[taken:]
        while len(data) >= 2:
            opcode, length, start = data[0] & 15, data[1], 2
            if length >= 126:
                start = 4 if length == 126 else 10
                length = int.from_bytes(data[2:start], "big")
            if len(data) < start + min(length, _HEAD_NBYTES):
                break
            head = data[start : start + min(length, _HEAD_NBYTES)]
            agent.skip = max(0, start + length - len(data))
            data = data[start + length :]
            self._on_frame(agent, opcode, head)
        agent.rest = data

    def _on_frame(self, agent: Agent, opcode: int, head: bytes) -> None:
        if opcode == Opcode.PING:
            self._send(agent, Frame(Opcode.PONG, head).serialize(mask=True))
        elif opcode == Opcode.BINARY or head.startswith(b'{"type":"Begin"'):
            self.begun += 1
            self._send(agent, framed(ChildRunning(0, 2000 + agent.node_id)))
        elif head.startswith(b'{"type":"NewRound"'):
            self.again += 1
            self.again_s = time.monotonic()

    def _drop(self, agent: Agent) -> None:
        self._epoll.unregister(agent.sock)
        del self._agents[agent.sock.fileno()]
        agent.is_open = False
        agent.sock.close()

    def _say(self, event: str, **more: Any) -> None:
        write(self._lines, {"event": event, **more})


def main() -> None:
    """Connect when told to, and behave as agents of a cluster that trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("token")
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parsed = parser.parse_args()
    Agents(parsed.url, parsed.token, parsed.first, parsed.last).serve()


if __name__ == "__main__":
    main()
