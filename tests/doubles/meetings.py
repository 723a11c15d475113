"""Nodes that train in step without a framework: they meet at every step, or the test fails.

Runs in: the process of pytest; `train`, `steps_by_epoch` and `meet` in the child
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pyarrow as pa

from sparkdl.core.spec import DEFAULT_FEED
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import SOON_S

STEP_S = 30.0
"""A node that waits so long for the others would wait for ever."""
WIDE = 512
"""Bytes of a row beside its number."""


class Meetings:
    """Where nodes meet at each step. A node that leaves, or comes no more, fails the others."""

    def __init__(self, size: int = 2) -> None:
        self._barrier = threading.Barrier(size, timeout=STEP_S)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, name="meetings")]
        self._sockets: list[socket.socket] = []

    @property
    def waiting(self) -> int:
        return self._barrier.n_waiting

    def __enter__(self) -> Meetings:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._barrier.abort()
        for each in (self._listener, *self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(SOON_S)
        for each in (self._listener, *self._sockets):
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._sockets.append(sock)
                thread = threading.Thread(target=self._serve, args=(sock,), name="meeting")
                self._threads.append(thread)
                thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with suppress(OSError, threading.BrokenBarrierError):
            while sock.recv(1):
                self._barrier.wait()
                sock.sendall(b"+")
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def train(args: dict[str, Any], ctx: NodeContext) -> list[list[list[int]]]:
    """Read epochs until the feed ends, meeting the others at each step; return the rows used.

    Args: `port` of `Meetings`, `tail`, `feed` (the default one), `stop_all`: epoch and step at
        which all terminate, `pause`: epoch and step at which one node stands still until the
        meeting at `held`.
    """
    batches = ctx.batches(8, ["x"], args.get("feed", DEFAULT_FEED), even=True, tail=args["tail"])
    with socket.create_connection(("127.0.0.1", args["port"]), STEP_S) as sock:

        def ends(epoch: int, step: int) -> bool:
            sock.sendall(b"?")
            assert sock.recv(1), f"the other node did not come to step {step} of {epoch}"
            if ctx.rank == 1 and [epoch, step] == args.get("pause"):
                meet(args["held"])
            return [epoch, step] == args.get("stop_all")

        return steps_by_epoch(batches, ends)


def steps_by_epoch(batches: Any, ends: Callable[[int, int], bool]) -> list[list[list[int]]]:
    """Return the rows used in each step, by epoch; terminate where `ends(epoch, step)`."""
    epochs: list[list[list[int]]] = []
    for epoch in itertools.count():
        steps, has_left = [], False
        for step, batch in enumerate(batches):
            weights = batch.get("sample_weight", [1] * len(batch["x"]))
            steps.append([x for x, w in zip(batch["x"].tolist(), weights, strict=True) if w])
            if ends(epoch, step):
                batches.reader.terminate()
                has_left = True
        if not steps and not has_left and batches.reader.peek_batch() is None:
            return epochs
        epochs.append(steps)
    return epochs


def meet(port: int) -> None:
    """Wait for the others at another meeting."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"?")
        assert sock.recv(1)


def parts(*sizes: int, wide: int = WIDE) -> list[pa.Table]:
    """Return tables of so many rows whose column "x" goes on counting."""
    ends = list(itertools.accumulate(sizes))
    return [
        pa.table({"x": pa.array(range(end - size, end), pa.int64()), "f": [bytes(wide)] * size})
        for end, size in zip(ends, sizes, strict=True)
    ]
