"""A feed as a dataset of PyTorch on whole clusters: loaders' workers are processes of the nodes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from sparkdl.core.errors import NodeFailedError
from sparkdl.datasets.torch import torch_dataset
from sparkdl.feed.reader.batches import EpochBatches
from sparkdl.node.context import NodeContext
from tests.doubles.gates import Gate
from tests.doubles.nodes import all_gone, launch

pytestmark = pytest.mark.torch
deep = partial(pytest.param, marks=pytest.mark.deep)


def loader(ctx: NodeContext, start: str) -> Any:
    from torch.utils.data import DataLoader

    batches = ctx.batches(8, even=True)
    assert isinstance(batches, EpochBatches)
    data = torch_dataset(batches, "value")
    return DataLoader(
        data, batch_size=None, num_workers=2, multiprocessing_context=start, persistent_workers=True
    )


def read_two_epochs(start: str, ctx: NodeContext) -> list[Any]:
    data = loader(ctx, start)
    return [[batch.tolist() for batch in data] for _epoch in range(2)]


@pytest.mark.parametrize("start", ["fork", deep("forkserver"), deep("spawn")])
def test_workers_of_all_nodes_read_every_row_once_an_epoch(start: str) -> None:
    with launch(read_two_epochs, start) as cluster:
        for epoch in range(2):
            cluster.feed(range(epoch * 101, epoch * 101 + 101))
        results = cluster.results(60)
    for epoch in range(2):
        first, second = (result[epoch] for result in results)
        assert len(first) == len(second)
        rows = {row for batch in first + second for row in batch}
        assert rows == set(range(epoch * 101, epoch * 101 + 101))


def wait_for_rows(args: tuple[str, Gate], ctx: NodeContext) -> None:
    start, gate = args
    for _batch in loader(ctx, start):
        gate.wait()


@pytest.mark.smoke
@pytest.mark.parametrize("start", ["fork", deep("forkserver")])
def test_workers_end_with_their_node(start: str, tmp_path: Path) -> None:
    gate = Gate.at(tmp_path / "gate")
    with pytest.raises(NodeFailedError), launch(wait_for_rows, (start, gate), nodes=1) as cluster:
        cluster.feed(range(20))
        with gate.wait_until_reached():
            # A forked worker looks like the node's process itself: the eldest is meant.
            below = psutil.Process().children(recursive=True)
            children = [each for each in below if "sparkdl.node.child" in each.cmdline()]
            child = min(children, key=lambda process: process.create_time())
            workers = child.children(recursive=True)
            assert len(workers) >= 2
            child.kill()
        assert all_gone(workers)
        cluster.results(60)
