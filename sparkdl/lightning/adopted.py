"""Classes that become Lightning's when an instance is made: Lightning is imported late.

Runs in: child
"""

from __future__ import annotations

import sys
import types
from contextlib import suppress
from importlib import import_module
from typing import Any

from sparkdl.core.errors import FrameworkMissingError

FABRICS = ("lightning.fabric", "lightning_fabric")
TRAINERS = ("lightning.pytorch", "pytorch_lightning")


class Adopted:
    """Its instances have a base class of Lightning as well: of each Lightning that is imported.

    `lightning` and `pytorch_lightning` have classes of their own, and check for them.
    """

    _packages: tuple[str, ...]
    _base: str

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an instance of this class and of Lightning's."""
        module, _, name = cls._base.rpartition(":")
        homes = [f"{package}{module}" for package in _there(cls._packages)]
        bases = tuple(getattr(import_module(home), name) for home in homes)
        body = {"__module__": cls.__module__, "__doc__": cls.__doc__}
        kind: Any = types.new_class(cls.__name__, (cls, *bases), None, lambda ns: ns.update(body))
        return object.__new__(kind)


def _there(packages: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of `packages` that are imported, or else the first that can be."""
    if imported := tuple(package for package in packages if package in sys.modules):
        return imported
    for package in packages:
        with suppress(ImportError):
            import_module(package)
            return (package,)
    raise FrameworkMissingError(
        "PyTorch Lightning cannot be imported on this executor; pip install lightning"
    )
