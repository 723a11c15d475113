"""The contestants of `scale.py`: a real controller with simulated agents, and real plain nodes.

A second process of this program simulates the agents: many connections, no nodes. Lines on its
standard input control it: `go`, `report SECONDS`, `reset COUNT`, `count`. It parses as little as
possible, so that the driver dominates the measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import resource
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from harness import arguments, claim_stdout, write
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

TOKEN = "a token of the benchmark"
SOON_S = 100.0
TICK_S = 0.02
_PER_HOST = 8
_HEAD_NBYTES = 64


def framed(message: FromAgent) -> bytes:
    return Frame(Opcode.TEXT, encode(message).encode()).serialize(mask=True)


@dataclass(eq=False)
class Agent:
    """One connection. Splits received bytes into frames; retains only the start of long ones."""

    node_id: int
    sock: socket.socket
    is_open: bool = False
    rest: bytes = b""
    skip: int = 0
    steps: int = 0


class Agents:
    """All agents of the process, on one `epoll`."""

    def __init__(self, url: str, nodes: int) -> None:
        host, _, port = url.rpartition("//")[2].rpartition(":")
        self._address = host, int(port)
        key = b64encode(random.randbytes(16)).decode()
        self._handshake = (
            f"GET / HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n"
            f"Authorization: {bearer(TOKEN)}\r\n\r\n"
        ).encode()
        self._ids = range(nodes)
        self._epoll = select.epoll()
        self._agents: dict[int, Agent] = {}
        self._turns: deque[Agent] = deque()
        self._pings: deque[Agent] = deque()
        self._lines = claim_stdout()
        self._nbytes = self._again = 0
        self._again_s = self._period_s = 0.0

    def serve(self) -> None:
        """Execute the commands from standard input until it ends."""
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
            start_s = time.monotonic()
            for agent in list(self._agents.values())[-int(argument) :]:
                linger = struct.pack("ii", 1, 0)
                agent.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self._drop(agent)
            write(self._lines, "reset", since_s=start_s)
        elif command == "count":
            counts = {"nbytes": self._nbytes, "again": self._again, "again_s": self._again_s}
            write(self._lines, "count", **counts)

    def _each(self, turns: deque[Agent], count: int, act: Callable[[Agent], None]) -> None:
        for _ in range(count):
            agent = turns.popleft()
            if agent.is_open:
                act(agent)
                turns.append(agent)

    def _report(self, agent: Agent) -> None:
        agent.steps += 1
        rows = agent.steps * 256
        given = ReadCounts(rows, steps=agent.steps)
        count = FeedCount("input", rows + 4096, given, epoch_rows=rows + 4096, began=0)
        self._send(agent, framed(FeedProgress(0, (count,))))

    def _ping(self, agent: Agent) -> None:
        self._send(agent, Frame(Opcode.PING, b"ping").serialize(mask=True))

    def _send(self, agent: Agent, data: bytes) -> None:
        self._nbytes += len(data)
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
        self._nbytes += len(data)
        if not data:
            self._drop(agent)
        elif agent.is_open:
            self._take(agent, data)
        else:
            agent.rest += data
            if b"\r\n\r\n" in agent.rest:
                head, _, agent.rest = agent.rest.partition(b"\r\n\r\n")
                if b" 101 " not in head:
                    raise RuntimeError(head.decode())
                self._join(agent)

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
            self._send(agent, framed(ChildRunning(0, 2000 + agent.node_id)))
        elif head.startswith(b'{"type":"NewRound"'):
            self._again += 1
            self._again_s = time.monotonic()

    def _drop(self, agent: Agent) -> None:
        self._epoll.unregister(agent.sock)
        del self._agents[agent.sock.fileno()]
        agent.is_open = False
        agent.sock.close()


class Remote:
    """The process that simulates the agents."""

    def __init__(self, url: str, nodes: int) -> None:
        given = json.dumps({"way": "agents", "nodes": nodes, "url": url})
        self._process = subprocess.Popen(
            [sys.executable, __file__, given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def send(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(f"{line}\n")

    def ask(self, line: str = "count") -> dict[str, Any]:
        """Send a command, and return its answer."""
        self.send(line)
        assert self._process.stdout
        return json.loads(self._process.stdout.readline())  # type: ignore[no-any-return]

    def close(self) -> None:
        with self._process:
            assert self._process.stdin
            self._process.stdin.close()


def cpu_s() -> float:
    """Return the CPU time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def load(agents: Remote, seconds: float, name: str) -> dict[str, float]:
    """Measure the next seconds; return the share of a core and the bytes per second on the wire."""
    nbytes, cpu, start_s = agents.ask()["nbytes"], cpu_s(), time.monotonic()
    time.sleep(seconds)
    took_s = time.monotonic() - start_s
    cores = (cpu_s() - cpu) / took_s
    sent = agents.ask()["nbytes"] - nbytes
    return {f"{name}, cores": cores, f"{name}, kB/s": sent / took_s / 1e3}


def control(args: argparse.Namespace, lines: TextIO) -> None:  # noqa: PLR0915
    """Gather, train, lose 1 % of the agents at once; write the cost of each step."""
    from sparkdl.core.deadline import Deadline
    from sparkdl.core.spec import ClusterSpec, plan_nodes
    from sparkdl.core.throttle import period_s
    from sparkdl.driver.controller import Controller
    from sparkdl.driver.ending import Ending
    from sparkdl.driver.executors.local import LocalExecutor
    from sparkdl.driver.handle import Cluster
    from sparkdl.driver.health import HangWatch
    from sparkdl.driver.lifecycle import state as states
    from sparkdl.feed.transfer.endpoint import PROGRESS_PERIOD_S

    nodes = args.nodes
    settings = Settings(max_restarts=1)
    spec = ClusterSpec("bench", plan_nodes(nodes), "plain", settings=settings)
    where = LocalExecutor()
    where.relaunch = lambda nodes: None  # type: ignore[method-assign]  # lost agents stay lost
    controller = Controller(spec, TOKEN, where)
    url = controller.start("127.0.0.1", (0,)).url
    HangWatch(controller, 600.0).start()
    agents = Remote(url, nodes)
    agents.ask()
    done = threading.Event()

    def rows() -> Iterator[Any]:
        done.wait()
        yield from ()

    def all_in(view: Any) -> bool:
        return isinstance(view.state, states.Running) and len(view.state.in_map_fun) == nodes

    try:
        before, start_s = cpu_s(), time.monotonic()
        agents.send("go")
        soon = Deadline.after(SOON_S)
        if not controller.gather(soon) or not controller.wait_for(all_in, soon):
            raise TimeoutError(f"{len(controller.view.pids)} of {nodes} nodes are in map_fun")
        figures = {"gathered, s": time.monotonic() - start_s, "gathering, CPU s": cpu_s() - before}
        figures["gathering, MB"] = agents.ask()["nbytes"] / 1e6

        world = controller.look(lambda view: view.state.world)  # type: ignore[union-attr]
        cluster = Cluster(spec, controller, where, TOKEN, world, False, Ending("bench", where))
        figures |= load(agents, args.seconds, "idle")
        cluster.feed_async(rows())
        agents.send(f"report {period_s(PROGRESS_PERIOD_S, nodes)}")
        controller.wait_for(lambda view: view.progress >= nodes, Deadline.after(SOON_S))
        figures |= load(agents, args.seconds, "reporting")
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        figures["resident, MB"] = pages * os.sysconf("SC_PAGESIZE") / 1e6

        lost = max(1, nodes // 100)
        since_s = agents.ask(f"reset {lost}")["since_s"] + settings.settle_s
        controller.wait_for(
            lambda view: isinstance(view.state, states.Gathering), Deadline.after(SOON_S)
        )
        figures["loss decided, s"] = time.monotonic() - since_s
        give_up = time.monotonic() + SOON_S
        while (counts := agents.ask())["again"] < nodes - lost:
            if time.monotonic() > give_up:
                raise TimeoutError(f"{counts['again']} of {nodes - lost} agents were notified")
            time.sleep(0.05)
        write(lines, "figures", **figures, **{"all notified, s": counts["again_s"] - since_s})
    finally:
        done.set()
        with contextlib.suppress(Exception):
            controller.close()
        agents.close()


def count(args: object, ctx: Any) -> int:
    """Read one epoch."""
    return sum(len(batch["x"]) for batch in ctx.batches(1024, even=True))


def real_nodes(args: argparse.Namespace, lines: TextIO) -> None:
    """Launch plain nodes as processes of this machine, feed them an epoch, end them."""
    import pyarrow as pa

    import sparkdl

    rows = 1_000 * args.nodes
    parts = [pa.table({"x": range(rows // 8)}) for _ in range(8)]
    times = [time.monotonic()]
    with sparkdl.launch(
        *(None, count), nodes=args.nodes, framework="plain", executor="local"
    ) as cluster:
        times.append(time.monotonic())
        report = cluster.feed(parts)
        times.append(time.monotonic())
        assert sum(cluster.results(600)) == rows
    times.append(time.monotonic())
    names = ("to launch, s", "to feed, s", "to end, s")
    figures = {name: times[n + 1] - times[n] for n, name in enumerate(names)}
    apart = max(report.rows.values()) - min(report.rows.values())
    write(lines, "figures", **figures, **{"rows apart": apart})


def serve(folder: Path, there: Any) -> None:
    """Serve the file of a folder as an agent does, and to the first who connects to a socket."""
    from sparkdl.feed.transfer.server import FlightServer

    store: Any = None
    server = FlightServer("127.0.0.1", TOKEN, store, folder=folder)
    with socket.create_server(("127.0.0.1", 0)) as plain:
        there.send((server.uri, plain.getsockname()))
        with plain.accept()[0] as sock, next(folder.iterdir()).open("rb") as file:
            sock.sendfile(file)
    server.shutdown()


def model(args: argparse.Namespace, lines: TextIO) -> None:
    """Fetch a file of `args.nodes` MB from an agent's server; beside it, copy the same bytes."""
    from sparkdl.feed.transfer.files import SentFile, digest_of
    from sparkdl.feed.transfer.messages import FeedSpec
    from sparkdl.ml.model_file import fetch_file

    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as target:
        file, copy = Path(name, "model.pt"), Path(target, "copy")
        with file.open("wb") as out:
            for _ in range(args.nodes):
                out.write(random.randbytes(1_000_000))
        sent = SentFile(file.name, file.stat().st_size, digest_of(file))
        mine, theirs = (spawn := multiprocessing.get_context("spawn")).Pipe()
        server = spawn.Process(target=serve, args=(Path(name), theirs))
        server.start()
        uri, address = mine.recv()
        times = [time.monotonic()]
        fetch_file(FeedSpec("", 0, "", (), TOKEN), uri, sent, Path(target, "fetched"))
        times.append(time.monotonic())
        with socket.create_connection(address) as sock, copy.open("wb") as out:
            while data := sock.recv(1 << 22):
                out.write(data)
        times.append(time.monotonic())
        server.join(SOON_S)
    fetched_s, copied_s = (after - before for before, after in itertools.pairwise(times))
    figures = {"fetched, s": fetched_s, "copied, s": copied_s, "ratio": fetched_s / copied_s}
    write(lines, "figures", **figures)


def main() -> None:
    args = arguments()
    if args.way == "agents":
        Agents(args.url, args.nodes).serve()
    else:
        {"control": control, "nodes": real_nodes, "model": model}[args.way](args, claim_stdout())


if __name__ == "__main__":
    main()
