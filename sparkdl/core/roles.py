"""What a node is for, and the rules that follow from it.

Runs in: anywhere
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from sparkdl.core.errors import ConfigError


@dataclass(frozen=True)
class Role:
    """A kind of node. Behaviour follows from these flags, never from the name.

    Attributes:
        name: TensorFlow's job name.
        is_chief: leads the training: writes checkpoints, exports the model, is rank 0.
        is_trainer: is one of the nodes whose steps are synchronous; counted in
            `ctx.num_workers`.
        is_fed: receives rows of `cluster.train`.
        can_be_fed: receives rows of a feed that is for its role.
        finishes_job: the job is over when every such node has returned from `map_fun`; the
            other nodes are stopped then.
        wants_gpu: is given a GPU where there are any.
        is_server: runs a server of the framework until it is stopped; `map_fun` is not called.
        is_expendable: the cluster can go on with fewer such nodes, if `min_nodes` allows.
        failure: what follows if such a node fails. `fatal`: all nodes begin anew, or the cluster
            fails. `alone`: it begins anew by itself, in the same world.
    """

    name: str
    is_chief: bool = False
    is_trainer: bool = False
    is_fed: bool = False
    can_be_fed: bool = False
    finishes_job: bool = False
    wants_gpu: bool = False
    is_server: bool = False
    is_expendable: bool = False
    failure: Literal["fatal", "alone"] = "fatal"

    @property
    def is_needed(self) -> bool:
        """Whether the training cannot go on without such a node."""
        return self.failure == "fatal" or self.is_server


CHIEF = Role(
    "chief",
    is_chief=True,
    is_trainer=True,
    is_fed=True,
    can_be_fed=True,
    finishes_job=True,
    wants_gpu=True,
)
WORKER = Role(
    "worker",
    is_trainer=True,
    is_fed=True,
    can_be_fed=True,
    finishes_job=True,
    wants_gpu=True,
    is_expendable=True,
)
PS = Role("ps")
EVALUATOR = Role("evaluator", can_be_fed=True, is_expendable=True, failure="alone")


def chief_named(name: str) -> Role:
    """Return the chief's role under `name` (`chief`, or TensorFlow 1's `master`).

    Raises:
        ConfigError: if the name belongs to another role.
    """
    if name in (WORKER.name, PS.name, EVALUATOR.name) or not name.isidentifier():
        raise ConfigError(
            f"master_node={name!r} cannot name the chief; use 'chief' or 'master', or leave it out"
        )
    return replace(CHIEF, name=name)


def coordinated(role: Role) -> Role:
    """Return `role` where the chief alone trains, on servers that ps and workers run.

    Rows go to the workers. The job is over when the chief has returned. The chief goes on while a
    worker begins anew; the variables of a ps are gone with it.
    """
    if role.is_chief:
        return replace(role, is_fed=False)
    if role.name == PS.name:
        return replace(role, is_server=True, finishes_job=False)
    if role.name == WORKER.name:
        return replace(role, is_server=True, finishes_job=False, failure="alone")
    return role
