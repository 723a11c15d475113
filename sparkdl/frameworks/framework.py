"""What sparkdl asks of a deep-learning framework.

Runs in: child, driver

A framework is one file with one subclass, and one row in `frameworks/registry.py`. No method may
import the framework at the driver; `import_modules` and what follows it run in the child only.
"""

from __future__ import annotations

from typing import ClassVar

from sparkdl.core.spec import ClusterSpec
from sparkdl.core.world import Member, World


class Framework:
    """Nothing to prepare: `map_fun` runs with the world in its context. Others override."""

    name: ClassVar[str] = "plain"
    distributions: ClassVar[tuple[str, ...]] = ()
    """Importable modules of which the executors need at least one; checked in the preflight."""

    shares_port: ClassVar[bool] = False
    """Whether the framework's server binds with `SO_REUSEADDR`. The node's reservation, which is
    bound and does not listen, is then kept beside it (Linux allows that, socket(7)), so that no
    other process can take the port in between."""

    def import_modules(self) -> None:
        """Import what is slow to import, while the other nodes are still gathering.

        Raises:
            FrameworkMissingError: if the framework is missing or unusable.
        """

    def environment(self, world: World, member: Member, spec: ClusterSpec) -> dict[str, str]:
        """Return the environment variables that tell the framework its place in the world."""
        return {}

    def before_map_fun(self, world: World, member: Member) -> None:
        """Prepare the imported framework; the environment is set and the port released."""

    def is_port_lost(self, error: BaseException) -> bool:
        """Whether `error` says that another process has taken this node's port."""
        return False
