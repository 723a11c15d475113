"""What user code on a node has of Spark: the files of `SparkContext.addFile`. The rest is refused.

A child is no task of Spark. Without this, a session made in `map_fun` starts a second Spark, and
`SparkFiles` fails by a bare assertion. Modules of pyspark are changed once the program imports
them: importing pyspark at each start would take half a second.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import MappingProxyType, ModuleType
from typing import Any, NoReturn

from sparkdl.core.errors import ConfigError

FILES = "SPARKDL_SPARK_FILES"
"""The environment variable with the folder of `SparkContext.addFile` on this executor."""


def refuse_spark() -> None:
    """Have pyspark, which is imported later, name what nodes do not have."""
    sys.meta_path.insert(0, _Finder())


def _refuse(what: str, instead: str) -> NoReturn:
    raise ConfigError(f"{what} cannot be used inside map_fun: nodes have no Spark. {instead}")


def _files(module: Any) -> None:
    def root(cls: Any) -> str:
        folder = os.environ.get(FILES, "")
        if not folder:
            _refuse("SparkFiles", "executor='local' starts no task of Spark: pass the path in args")
        return folder

    module.SparkFiles.getRootDirectory = classmethod(root)


def _context(module: Any) -> None:
    def refuse(cls: Any, *args: Any, **kwargs: Any) -> None:
        _refuse(
            "SparkContext and SparkSession",
            "Use them in the driver: pass results in args, and feed rows with cluster.feed(df)",
        )

    module.SparkContext._ensure_initialized = classmethod(refuse)


_CHANGES: Mapping[str, Callable[[Any], None]] = MappingProxyType(
    {
        # The second names are those of pyspark 3.5.
        **dict.fromkeys(("pyspark.core.files", "pyspark.files"), _files),
        **dict.fromkeys(("pyspark.core.context", "pyspark.context"), _context),
    }
)


class _Finder:
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _CHANGES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, _CHANGES[name])
        return spec


class _Loader(Loader):
    def __init__(self, loader: Any, change: Callable[[Any], None]) -> None:
        self._loader, self._change = loader, change

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)

    def __getattr__(self, name: str) -> Any:  # resources of the module, for example
        return getattr(self._loader, name)
