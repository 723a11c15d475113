"""The page's program, and a function of nodes around Fabric."""

from lightning.fabric import Fabric

# block: PyTorch Lightning


def train(args, ctx):
    # block: Environment
    return fabric.global_rank, fabric.world_size


assert sparkdl.run(spark, train, nodes=2, framework="torch") == [(0, 2), (1, 2)]
