"""The interface between sparkdl and a deep-learning framework, and the table of frameworks.

Runs in: child, driver

A framework is one file with one subclass of `Framework`, and one row in `_FRAMEWORKS`. No method
may import the framework at the driver; `import_modules` and what follows it run in the child only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any, ClassVar

import psutil

from sparkdl.core.errors import ConfigError, FrameworkMissingError
from sparkdl.core.imports import advice_on_missing
from sparkdl.core.spec import ClusterSpec
from sparkdl.core.texts import did_you_mean
from sparkdl.core.world import Member, World

# gloo raises a plain RuntimeError, so only its words tell a lost peer from another error.
_BROKEN = re.compile(r"gloo/transport/.*(closed|reset) by peer", re.IGNORECASE)


class Framework:
    """Nothing to prepare: `map_fun` runs with the world in its context. Others override."""

    name: ClassVar[str] = "plain"
    distributions: ClassVar[tuple[str, ...]] = ()
    """Importable modules; the preflight checks that the executors have at least one."""

    import_environment: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Variables that are read while libraries are imported; the user's own go first."""

    shares_port: ClassVar[bool] = False
    """Whether the framework's server binds with `SO_REUSEADDR`. The node's reservation, bound but
    not listening, then stays open beside it, as Linux allows (socket(7)), and no other process can
    take the port in between.
    """

    has_servers: ClassVar[bool] = False
    """Whether `serve` makes a node a server of a chief that trains on such nodes."""

    def import_modules(self) -> None:
        """Import slow modules while the other nodes are still gathering.

        Raises:
            FrameworkMissingError: if the framework is missing or unusable.
        """

    def import_more(self) -> None:
        """Import what the library imports at its first use, in a child that has nothing to do."""

    def gpus(self) -> list[str]:
        """Return the GPUs that the imported framework can compute on, in its own words."""
        return []

    def environment(self, world: World, member: Member, spec: ClusterSpec) -> dict[str, str]:
        """Return the environment variables from which the framework reads its place in the world.

        They are set after the import, because nodes import before they know the world.
        """
        return {}

    def before_map_fun(self, world: World, member: Member) -> None:
        """Prepare the imported framework; the environment is set and the port released."""

    def after_map_fun(self, has_failed: bool) -> None:
        """Disconnect from the other nodes; if this one has failed, without waiting for them."""

    def mesh(self, axes: Mapping[str, int], world: World, member: Member) -> Any:
        """Return the framework's own mesh over all nodes that train; see `ctx.mesh`.

        Raises:
            ConfigError: if it has none, or the axes do not fit.
        """
        raise ConfigError(
            f"framework={self.name!r} has no mesh over several nodes: launch the cluster with "
            "framework='torch' or framework='jax'"
        )

    def generator(self, seed: Sequence[int]) -> Any:
        """Return a new source of random numbers, see `ctx.generator`."""
        import numpy as np

        return np.random.default_rng(seed)

    def serve(self) -> None:
        """Run a server for the chief until this process is ended."""
        raise NotImplementedError

    def is_port_lost(self, error: BaseException) -> bool:
        """Whether `error` says that another process has taken this node's port."""
        return False

    def is_peer_lost(self, error: BaseException) -> bool:
        """Whether `error` says that a connection to another node has broken, gloo's or ours.

        A killed process closes its connections before it has ended, so the errors of its peers come
        first, although these are well.
        """
        return _BROKEN.search(str(error)) is not None

    def is_peer_lost_in(self, log: str) -> bool:
        """Whether the log of a process that ended itself says that it did so for another node."""
        return False


def imported(module: str, title: str, install: str) -> Any:
    """Import a framework, or say how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise FrameworkMissingError(
            f"{title} cannot be imported on this executor: {error}. Install it in the Python "
            f"environment of the executors: pip install {install}"
        ) from error


def shared_cores(world: World, member: Member) -> int | None:
    """Return a node's part of its host's cores; `None` if it has the host to itself."""
    on_host = sum(other.host == member.host for other in world.members)
    if on_host == 1:
        return None
    # Not the host's cores: a container or taskset may allow this process fewer of them.
    cores = len(psutil.Process().cpu_affinity()) if psutil.LINUX else psutil.cpu_count() or 1
    return max(1, cores // on_host)


_FRAMEWORKS = {
    "jax": "sparkdl.frameworks.jax:Jax",
    "plain": "sparkdl.frameworks.framework:Framework",
    "tensorflow": "sparkdl.frameworks.tensorflow:TensorFlow",
    "torch": "sparkdl.frameworks.torch:Torch",
}
_UNSET = {
    "torch": re.compile("environment variable (RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected"),
    "jax": re.compile("coordinator_address should be defined"),
}
"""By framework: what its own code raises where it does not find the cluster."""


def advice_about(error: BaseException, framework: str) -> str:
    """Return advice on an error of user code, if there is any.

    Which framework to launch with, if the code is of another one; how to ship a missing module.
    """
    for needed, pattern in _UNSET.items():
        if needed != framework and pattern.search(str(error)):
            return (
                f"The cluster was launched with framework={framework!r}: this code finds the other "
                f"nodes only with launch(…, framework={needed!r})"
            )
    return advice_on_missing(error)


TRAINING = tuple(name for name in _FRAMEWORKS if name != Framework.name)
"""The names of the frameworks that train: all except `plain`."""


def framework_named(name: str) -> Framework:
    """Return the framework called `name`, or the user's own one at `module:Class`.

    Raises:
        ConfigError: if there is none.
    """
    module, _, cls = _FRAMEWORKS.get(name, name).partition(":")
    if not cls:
        known = ", ".join(sorted(_FRAMEWORKS))
        near = did_you_mean(name, _FRAMEWORKS)
        choose = f"{near} Choose" if near else "; choose"
        raise ConfigError(
            f"framework={name!r} is not known{choose} one of {known}, or name your own "
            "subclass of sparkdl.frameworks.framework.Framework as 'module:Class'"
        )
    try:
        kind = getattr(import_module(module), cls)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"framework={name!r} cannot be imported: {error}. Install its module where the driver "
            "runs, or correct 'module:Class'"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Framework)):
        raise ConfigError(
            f"framework={name!r} must be a subclass of sparkdl.frameworks.framework.Framework"
        )
    return kind()
