"""The requested cluster: its nodes, their roles, and its settings."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from sparkdl.core.errors import ConfigError
from sparkdl.core.options import Placement, Roles
from sparkdl.core.settings import Settings

Printing = Literal["all", "first", "none"]

DEFAULT_FEED = "input"
"""The default feed's name; TensorFlowOnSpark's queue has the same."""


@dataclass(frozen=True)
class Role:
    """A kind of node. Behaviour follows from these flags, never from the name.

    Attributes:
        name: TensorFlow's job name.
        is_chief: leads the training: writes checkpoints, exports the model, is rank 0.
        is_trainer: is one of the nodes whose steps are synchronous; counted in
            `ctx.num_workers`, and given a GPU where there are any.
        is_fed: receives rows of `cluster.feed`.
        can_be_fed: receives rows of a feed that is for its role.
        is_server: runs a server of the framework until it is stopped; `map_fun` is not called.
        is_expendable: the cluster can continue with fewer such nodes, if `min_nodes` allows.
        is_needed: its failure restarts all nodes or fails the cluster; else the others go on.
    """

    name: str
    is_chief: bool = False
    is_trainer: bool = False
    is_fed: bool = False
    can_be_fed: bool = False
    is_server: bool = False
    is_expendable: bool = False
    is_needed: bool = True

    @property
    def finishes_job(self) -> bool:
        """Whether the job is over when every such node has returned; others are stopped then."""
        return self.is_trainer and not self.is_server


CHIEF = Role("chief", is_chief=True, is_trainer=True, is_fed=True, can_be_fed=True)
WORKER = Role("worker", is_trainer=True, is_fed=True, can_be_fed=True, is_expendable=True)
PS = Role("ps")
EVALUATOR = Role("evaluator", can_be_fed=True, is_expendable=True, is_needed=False)


def chief_named(name: str) -> Role:
    """Return the chief's role under `name` (`chief`, or TensorFlow 1's `master`)."""
    if name in (WORKER.name, PS.name, EVALUATOR.name) or not name.isidentifier():
        raise ConfigError(
            f"Roles(chief={name!r}) cannot name the chief; use 'chief' or 'master', or leave it out"
        )
    return replace(CHIEF, name=name)


def coordinated(role: Role) -> Role:
    """Return `role` where the chief alone trains, on servers that ps and workers run.

    Rows go to the chief. The job is over when the chief has returned.
    """
    if role.name in (PS.name, WORKER.name):
        return replace(role, is_server=True, is_fed=False, can_be_fed=False)
    return role


@dataclass(frozen=True)
class NodeSpec:
    """One wanted node: its id (the number of its Spark partition), role and index in the role."""

    node_id: int
    role: Role
    index: int

    @property
    def name(self) -> str:
        return f"{self.role.name}:{self.index}"


@dataclass(frozen=True)
class ClusterSpec:
    """The wanted cluster, complete and checked.

    Attributes:
        cluster_id: names the cluster in logs, process names and messages.
        nodes: by node id.
        framework: a name that `sparkdl.frameworks.framework.framework_named` knows.
        num_gpus: for each node that trains, or for the nodes of each role by name; see `gpus_of`.
        release_port: before `map_fun` starts; otherwise by `ctx.release_port()`.
        prints: the nodes whose output the driver prints; `first` is the node of rank 0.
        default_fs: Hadoop's default file system, for `ctx.absolute_path`.
        working_dir: the driver's working directory, likewise.
        tensorboard: log directory of a TensorBoard beside the first node; empty for one of its own
            in the node's working directory, `None` for no TensorBoard.
        driver_nodes: how many nodes, the first ones, run on the driver's machine.
        checkpoint_dir: URL of the folder of the checkpoints; `None` for none.
        is_watched: nodes report their use of CPU, memory and GPU.
        preload: modules that children import after the framework, before there is a world.
        independent_models: the user wants nodes that train without an exchange.
    """

    cluster_id: str
    nodes: tuple[NodeSpec, ...]
    framework: str = "tensorflow"
    placement: Placement = "auto"
    num_gpus: int | dict[str, int] | None = None
    release_port: bool = True
    prints: Printing = "none"
    default_fs: str = "file://"
    working_dir: str = "."
    tensorboard: str | None = None
    driver_nodes: int = 0
    checkpoint_dir: str | None = None
    preload: tuple[str, ...] = ()
    is_watched: bool = False
    independent_models: bool = False
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        rows = self.settings.feeding.global_batch_size
        fed = sum(node.role.is_fed for node in self.nodes)
        if rows is not None and rows < fed:
            raise ConfigError(
                f"Feeding(global_batch_size={rows}) must be at least {fed}, a row for each node"
            )
        least = self.settings.recovery.min_nodes
        if least is not None and least > len(self.nodes):
            raise ConfigError(
                f"Recovery(min_nodes={least}) must be at most the {len(self.nodes)} nodes of the "
                "cluster"
            )
        names = {node.role.name for node in self.nodes}
        by_role = self.num_gpus if isinstance(self.num_gpus, dict) else {"": self.num_gpus}
        for name, count in by_role.items():
            if name and name not in names:
                raise ConfigError(
                    f"num_gpus={self.num_gpus} names {name!r}: must name roles of the cluster, "
                    f"which are {', '.join(sorted(names))}"
                )
            # `isinstance` would accept True, which is an int: one GPU.
            if count is not None and (type(count) is not int or count < 0):
                raise ConfigError(
                    f"num_gpus={self.num_gpus!r} must be a whole number, 0 or more, or left out"
                )

    def gpus_of(self, node: NodeSpec) -> int | None:
        """Return how many GPUs a node is to have; `None` for what Spark assigns, or else one."""
        if isinstance(self.num_gpus, dict):
            # A role without an entry has the default: GPUs for nodes that train, none for others.
            return self.num_gpus.get(node.role.name, None if node.role.is_trainer else 0)
        return self.num_gpus if node.role.is_trainer else 0

    @property
    def is_fed(self) -> bool:
        return self.settings.feeding.fed

    @property
    def num_tasks(self) -> int:
        return len(self.nodes) - self.driver_nodes

    @property
    def num_trainers(self) -> int:
        return sum(node.role.is_trainer for node in self.nodes)


def plan_nodes(
    num_nodes: int, roles: Roles = Roles(), is_coordinated: bool = False
) -> tuple[NodeSpec, ...]:
    """Give each node id a role: first ps, then the chief, the evaluator, the workers.

    The order is TensorFlowOnSpark's: of 5 nodes with `Roles(ps=1, chief="chief", evaluator=True)`,
    ps is 0, chief 1, evaluator 2, workers are 3 and 4.

    Args:
        is_coordinated: the chief trains on servers that ps and workers run.
    """
    if num_nodes < 1:
        raise ConfigError(f"a cluster needs at least one node, not {num_nodes}")
    planned: list[Role] = [PS] * roles.ps
    if roles.chief is not None:
        planned.append(chief_named(roles.chief))
    if roles.evaluator:
        planned.append(EVALUATOR)
    others = [f"{roles.ps} ps", *(role.name for role in planned[roles.ps :])]
    num_workers = num_nodes - len(planned)
    if num_workers < 0 or not (num_workers or roles.chief):
        raise ConfigError(
            f"{num_nodes} nodes do not leave room for a worker beside {', '.join(others)}; raise "
            "the number of nodes (num_executors)"
        )
    planned += [WORKER] * num_workers
    if is_coordinated:
        _check_coordinated(roles, num_workers)
        # Last, because the workers' role changes as well.
        planned = [coordinated(role) for role in planned]
    counts: dict[str, int] = {}
    nodes = []
    for node_id, role in enumerate(planned):
        index = counts.get(role.name, 0)
        counts[role.name] = index + 1
        nodes.append(NodeSpec(node_id, role, index))
    return tuple(nodes)


def _check_coordinated(roles: Roles, num_workers: int) -> None:
    if not roles.ps:
        raise ConfigError(
            "Roles(coordinator=True) needs parameter servers: set ps to 1 or more, or leave it out"
        )
    if roles.chief is None:
        raise ConfigError(
            f"Roles(ps={roles.ps}) needs a chief to run map_fun, on servers that ps and workers "
            "run: add chief='chief' (it is one of the nodes). Or set coordinator=False: map_fun "
            "then runs on all nodes, and starts its own servers"
        )
    if not num_workers:
        raise ConfigError(
            f"Roles(ps={roles.ps}) with a chief leaves no worker to run the steps; raise the "
            "number of nodes (num_executors)"
        )
