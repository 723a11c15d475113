"""Where a node is among the others, as Lightning asks.

Runs in: child
"""

from __future__ import annotations

import socket

from sparkdl.core.errors import ConfigError
from sparkdl.lightning.adopted import FABRICS, Adopted
from sparkdl.node.context import NodeContext, current


class Environment(Adopted):
    """A `ClusterEnvironment` for `Trainer(plugins=[…])` and `Fabric(plugins=[…])`.

    Each node of the cluster is one of Lightning's nodes with one device, wherever it is: give
    `num_nodes=ctx.num_workers` and `devices=1`. Lightning starts no processes.
    https://lightning.ai/docs/pytorch/stable/clouds/cluster_expert.html

    Args:
        ctx: of this node, by default the one whose process this is.

    Raises:
        ConfigError: on a node that does not train; and in the trainer, if `num_nodes` or `devices`
            do not match the cluster.
        FrameworkMissingError: if there is no Lightning.
    """

    _packages = FABRICS
    _base = ".plugins.environments:ClusterEnvironment"

    def __init__(self, ctx: NodeContext | None = None) -> None:
        ctx = ctx or current()
        if ctx is not None and not ctx.member.role.is_trainer:
            raise ConfigError(f"{ctx.member.node.name} does not train: use Lightning on workers")
        self._rank = ctx.rank if ctx else 0
        self._size = ctx.num_workers if ctx else 1
        leader = ctx.world.trainers[0] if ctx else None
        self._address = (leader.host, leader.port) if leader else ("127.0.0.1", _free_port())

    @property
    def creates_processes_externally(self) -> bool:
        """True: the nodes are there."""
        return True

    @property
    def main_address(self) -> str:
        """The host of rank 0."""
        return self._address[0]

    @property
    def main_port(self) -> int:
        """The port that is reserved on it."""
        return self._address[1]

    @staticmethod
    def detect() -> bool:
        """Return whether this is the process of a node that trains."""
        ctx = current()
        return ctx is not None and ctx.member.role.is_trainer

    def world_size(self) -> int:
        """Return how many nodes train."""
        return self._size

    def set_world_size(self, size: int) -> None:
        """Compare with what the trainer was given: `num_nodes * devices`.

        Raises:
            ConfigError: if that is not the number of nodes.
        """
        if size != self._size:
            raise ConfigError(
                f"the Trainer counts num_nodes * devices = {size} processes, and {self._size} "
                f"nodes train; {self._advice()}"
            )

    def global_rank(self) -> int:
        """Return this node's rank."""
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        """Compare with what the trainer makes of `node_rank` and `devices`.

        Raises:
            ConfigError: if they differ, because `devices` is not 1.
        """
        if rank != self._rank:
            raise ConfigError(
                f"the Trainer counts several devices for each node (it takes node {self._rank} for "
                f"rank {rank}), and each node is one process; {self._advice()}"
            )

    def local_rank(self) -> int:
        """Return 0: a node sees its own devices only."""
        return 0

    def node_rank(self) -> int:
        """Return this node's rank."""
        return self._rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compare what the trainer was given with the cluster.

        Raises:
            ConfigError: if they differ.
        """
        if (num_devices, num_nodes) != (1, self._size):
            raise ConfigError(
                f"devices={num_devices}, num_nodes={num_nodes} does not fit {self._size} nodes; "
                f"{self._advice()}"
            )

    def teardown(self) -> None:
        """Nothing: the node's end destroys the process group."""

    def _advice(self) -> str:
        return f"write Trainer(devices=1, num_nodes={self._size}), or num_nodes=ctx.num_workers"


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
