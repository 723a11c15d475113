"""A cluster that stays up for the tests of a file: its nodes run one function after another.

A framework takes seconds to import, and most tests need its nodes, not the launch of them. What is
about launches, restarts and ends is not for a lab.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import sparkdl
from sparkdl.core.errors import ShutdownTimeoutError
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import launch
from tests.doubles.until import until

Body = Callable[[Any, NodeContext], Any]
_DONE_S, _LATER_S = 60.0, 30.0


@dataclass(frozen=True)
class Lab:
    """A cluster whose nodes wait for functions at pipes in `folder`.

    A feed that one function has ended is no use to the next: give each feeds of its own names.
    """

    cluster: sparkdl.Cluster
    folder: Path
    size: int

    def begin(self, body: Body, args: Any) -> None:
        assert self.cluster.status() == "Running", "a function before did not return on all nodes"
        for rank in range(self.size):
            _asks(self.folder, rank).write_bytes(cloudpickle.dumps((body, args)))

    def ended(self, feed: str) -> list[Any]:
        self.cluster.end_feeds(feed)
        return self.results()

    def results(self) -> list[Any]:
        """Wait for what `body` returned on each node, by rank; raise what it raised.

        Others may wait for that node for ever: without their answers the cluster is shut down.
        """
        found: dict[int, Any] = {}
        with ThreadPoolExecutor(self.size) as readers:
            answers = {
                readers.submit(_answers(self.folder, rank).read_bytes): rank
                for rank in range(self.size)
            }
            try:
                for answer in as_completed(answers):
                    found[answers[answer]] = result = cloudpickle.loads(answer.result())
                    if isinstance(result, Exception):
                        raise result
            except BaseException:  # the test's time is over, perhaps
                for late in wait(answers, _LATER_S).not_done:
                    with suppress(ShutdownTimeoutError):
                        self.cluster.shutdown(timeout_s=0.0)
                    _answers(self.folder, answers[late]).write_bytes(b"")
                raise
        return [found[rank] for rank in range(self.size)]


@contextmanager
def lab(
    folder: Path, framework: str, size: int, nodes: int | None = None, **options: Any
) -> Iterator[Lab]:
    """Start a lab of `size` nodes, and end it.

    Args:
        nodes: of the cluster, if only the first `size` of them run functions.
    """
    for rank in range(size):
        os.mkfifo(_asks(folder, rank))
        os.mkfifo(_answers(folder, rank))
    with launch(_run_bodies, folder, nodes or size, framework=framework, **options) as cluster:
        yield Lab(cluster, folder, size)
        if cluster.status() != "Running":
            return
        for rank in range(size):
            assert until(partial(_ends, _asks(folder, rank)), _DONE_S), f"{rank} runs a function"
        cluster.results(_DONE_S)


def lab_of(framework: str, size: int, *, saves: bool = False, **options: Any) -> Any:
    """Return a fixture: a lab for the tests of a module; for the arguments see `lab`.

    Args:
        saves: the nodes keep checkpoints, in its folder.
    """

    @pytest.fixture(scope="module")
    def made(run_name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
        folder = tmp_path_factory.mktemp("lab")
        saved: dict[str, Any] = {"checkpoint_dir": str(folder / "saved")} if saves else {}
        with lab(folder, framework, size, **saved, **options) as started:
            yield started

    return made


def _asks(folder: Path, rank: int) -> Path:
    return folder / f"asks-{rank}"


def _answers(folder: Path, rank: int) -> Path:
    return folder / f"answers-{rank}"


def _ends(asks: Path) -> bool:
    """Say that no more functions come, if the node listens."""
    try:
        os.close(os.open(asks, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:  # ENXIO: it runs one, or it hangs
        return False
    return True


def _run_bodies(folder: Path, ctx: NodeContext) -> None:
    while asked := _asks(folder, ctx.rank).read_bytes():
        body, args = cloudpickle.loads(asked)
        try:
            result = body(args, ctx)
        except Exception as error:  # noqa: BLE001 - the test raises it
            result = error
        _answers(folder, ctx.rank).write_bytes(cloudpickle.dumps(result))
