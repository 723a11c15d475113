"""`ctx.mesh`: the nodes in rows and columns, for models that several of them hold together.

Runs in: child
"""

from __future__ import annotations

from typing import Any

from sparkdl.core.errors import ConfigError
from sparkdl.core.spec import ClusterSpec
from sparkdl.core.world import Member, World
from sparkdl.frameworks.registry import framework_named


class Meshes:
    """What `ctx` offers to data, model and hybrid parallelism; see docs/meshes.md."""

    world: World
    member: Member
    _spec: ClusterSpec

    def mesh(self, **axes: int) -> Any:
        """Return the framework's own mesh: `ctx.mesh(data=2, model=2)`.

        Call it on all nodes that train, alike. Nodes that differ in the last axis alone are
        neighbours by rank, so give the axis that talks most, as a rule the model's, last.

        Args:
            axes: how many nodes, with JAX how many devices, are along each; one may be -1, for what
                the others leave.

        Returns:
            With PyTorch a `torch.distributed.device_mesh.DeviceMesh`; the default process group is
            made if there is none. With JAX a `jax.sharding.Mesh` over the devices of all nodes.
            With TensorFlow a `tf.experimental.dtensor.Mesh`; call it before any other operation.

        Raises:
            ConfigError: if the axes do not fit the nodes, this node does not train, or the
                framework has no mesh.
        """
        if not self.member.role.is_trainer:
            raise ConfigError(
                f"{self.member.node.name} does not train: call ctx.mesh on chief and workers"
            )
        return framework_named(self._spec.framework).mesh(axes, self.world, self.member)
