"""A function and a program for `TorchDistributor`, and a model of blocks."""

import argparse
from pathlib import Path

from sparkdl.node.context import current

# block: PyTorch
# block: Lightning
# block: Hugging Face


def train(learning_rate, epochs):
    import torch

    torch.distributed.init_process_group()
    torch.distributed.barrier()  # else a rank may end while another still connects to it
    return torch.nn.Linear(epochs, 1)


Path("train.py").write_text(
    "import sys, torch\n"
    "torch.distributed.init_process_group()\n"
    "torch.distributed.barrier()\n"
    "assert torch.distributed.get_world_size() == 2\n"
    "assert sys.argv[1:] == ['--lr=0.001']\n"
)

# block: TorchDistributor
assert model.in_features == 5


def build_model():
    import torch

    class Blocks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)])

        def forward(self, x):
            for block in self.blocks:
                x = torch.relu(block(x))
            return x

    return Blocks()


def train_step(model, optimizer, step):
    import torch

    if step == 6 and not current().restarts:
        raise RuntimeError("the failure of the page's test")
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    current().report(step)


# block: Sharded models
with sparkdl.launch(
    spark,
    train,
    argparse.Namespace(steps=9),
    nodes=2,
    framework="torch",
    checkpoint_dir="/models/shards",
    max_restarts=1,
    feeding=sparkdl.Feeding(fed=False),
) as cluster:
    cluster.results()
assert cluster.reported()[0] == 8
