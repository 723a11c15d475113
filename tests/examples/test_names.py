"""What the look at names finds, and what it lets pass."""

from __future__ import annotations

import pytest

from tests.examples.names import unknown_names

WRONG = {
    "import sparkdl.lunch": "there is no sparkdl.lunch",
    "from sparkdl.lunch import run": "there is no sparkdl.lunch",
    "from sparkdl import TFClusters": "there is no sparkdl.TFClusters",
    "def f():\n import sparkdl\n sparkdl.errors.Wrong": "sparkdl.core.errors has no Wrong",
    "import sparkdl.horovod.spork as s": "there is no sparkdl.horovod.spork",
    "import sparkdl\nsparkdl.launch(None, print, node=2)": "launch takes no node",
    "import sparkdl\nwith sparkdl.launch(None) as c:\n c.feet()": "Cluster has no feet",
    "import sparkdl\nc = sparkdl.launch(None)\nc.feed(1, epoch=2)": "feed takes no epoch",
    "import sparkdl\nx = [sparkdl.launch(None).feet]": "Cluster has no feet",
    "import sparkdl\ndef f(c: sparkdl.NodeContext): c.rang": "NodeContext has no rang",
    "def f(args, ctx): print(ctx.dataset(1, z=2))": "dataset takes no z",
    "def f(args, ctx): ctx.last_checkpoint.stop": "LastCheckpoint has no stop",
    "from sparkdl.node.context import current\ncurrent().rang": "NodeContext has no rang",
    "import sparkdl\nsparkdl.run(1, print, node=2)": "run takes no node",
    "from sparkdl.tfos.TFCluster import run\nrun(1, print, 1, 1, restarts=2)": "takes no restarts",
    "from sparkdl import KerasEstimator as E\nE(1, epoch=1, epochs=1)": "takes no epoch",
    "import sparkdl\nsparkdl.KerasEstimator().setEpoch(1)": "KerasEstimator has no setEpoch",
}

RIGHT = """
import sparkdl.horovod.spark
from sparkdl.tfos import TFCluster

def train(args, ctx):
    import sparkdl.horovod.keras as hvd
    print(ctx.rank, ctx.num_workers, ctx.last_checkpoint.step, hvd.size(), hvd.callbacks.Any)
    checkpoint = sparkdl.keras.Checkpoint(ctx, every_steps=1)
    checkpoint.unknown

options = {}
cluster = TFCluster.run(None, train, None, 1, **options)
cluster.train(None, num_epochs=2)
cluster = print
cluster.unknown
"""


@pytest.mark.parametrize(("program", "complaint"), WRONG.items())
def test_what_does_not_exist_is_found(program: str, complaint: str) -> None:
    found = unknown_names(program)
    assert len(found) == 1
    assert found[0].endswith(complaint)


def test_what_exists_or_belongs_to_others_passes() -> None:
    assert unknown_names(RIGHT) == []
