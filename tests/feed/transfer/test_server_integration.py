"""Want of descriptors at a node is named to its feeders."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pyarrow as pa
import pytest

from sparkdl.core.errors import FeedClosedError, FeedTimeoutError
from sparkdl.feed.transfer.feeder import Feeder
from sparkdl.feed.transfer.messages import Target
from sparkdl.node.link import AgentLink
from tests.doubles.feeds import FEED, SOON_S, numbers, order

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")

DESCRIPTORS = 400
PIECES, ROWS = 12, 100


@dataclass
class Lean:
    """A node with few descriptors."""

    process: subprocess.Popen[str]
    target: Target
    link: AgentLink

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> str:
        """End it in order; return what it had to say."""
        _, said = self.process.communicate(timeout=SOON_S)
        assert self.process.returncode == 0, said
        return said


@contextmanager
def lean_node() -> Iterator[Lean]:
    near, far = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.doubles.lean_node", str(DESCRIPTORS), str(near.fileno())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=[near.fileno()],
    )
    near.close()
    with process:
        link = AgentLink(far)
        link._is_closing = True  # it would end its process, which is this one, with its agent
        try:
            node = Lean(process, Target(0, "worker:0", ""), link)
            node.target = Target(0, "worker:0", node.answer())
            yield node
        finally:
            link.close()
            with suppress(FeedClosedError):  # there is nobody to tell any more
                link.feeds.reader(FEED).terminate()
            process.kill()


def pieces(first: int, on_third: Callable[[], object] = lambda: None) -> Iterator[pa.RecordBatch]:
    """Yield batches whose column "x" counts from `first`; something happens before the third."""
    for i in range(PIECES):
        if i == 2:
            on_third()
        yield numbers(first + i * ROWS, first + (i + 1) * ROWS)


def test_want_of_descriptors_that_lasts_is_named_when_time_is_up() -> None:
    def take_all() -> None:
        node.tell("hold")
        assert int(node.answer()) > 0

    with lean_node() as node:
        with pytest.raises(FeedTimeoutError, match=r"no file descriptors are left, .*ulimit -n"):
            Feeder(order([node.target], timeout_s=1.5), 0).feed(pieces(0, take_all))
        node.tell("let go")
        assert Feeder(order([node.target]), 1).feed(pieces(0)).rows == PIECES * ROWS
        node.end()
