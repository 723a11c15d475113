"""What an executor says in a Spark task: whether it reaches the driver, and its packages.

Runs in: feeder, driver, child

This module is pickled by value and uses only the standard library, so that it can also inspect an
executor where sparkdl is missing or outdated.
"""

from __future__ import annotations

import json
import os
import platform
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import metadata, util
from typing import Any

PACKAGES = {
    "pyspark": ("pyspark", "pyspark-client", "pyspark-connect"),
    "pyarrow": ("pyarrow",),
    "numpy": ("numpy",),
    "pandas": ("pandas",),
    "cloudpickle": ("cloudpickle",),
    "msgspec": ("msgspec",),
    "tensorflow": ("tensorflow", "tensorflow-cpu"),
    "keras": ("keras",),
    "torch": ("torch",),
    "jax": ("jax",),
}
"""The packages to compare, and the distributions that contain them."""
_CONNECT_S = 5.0


def run_probe(host: str, port: int, batches: Iterable[Any]) -> Iterator[Any]:
    """Run one task, for `DataFrame.mapInArrow`; its row is the facts as JSON.

    The host is that of the driver, and empty if it cannot listen.
    """
    import pyarrow as pa

    for _ in batches:  # which only carry the partition
        pass
    found = basics()
    try:
        if host:
            socket.create_connection((host, port), _CONNECT_S).close()
    except OSError as error:
        found["unreachable"] = str(error)
    yield pa.RecordBatch.from_pydict({"facts": [json.dumps(found)]})


def basics() -> dict[str, Any]:
    versions = {"Python": platform.python_version(), "sparkdl": _own_version()}
    for package, distributions in PACKAGES.items():
        for name in distributions:
            with suppress(metadata.PackageNotFoundError):
                versions[package] = metadata.version(name)
                break
    host = socket.gethostname()
    return {
        "executor": f"{host} {os.getppid()}",  # the daemon of its Python workers
        "host": host,
        "versions": {name: version for name, version in versions.items() if version},
        "package": _package(),
    }


def _own_version() -> str:
    """Return the version of sparkdl here; empty without it, or if another package hides it."""
    if not os.path.isfile(os.path.join(_package(), "version.py")):
        return ""  # do not run the code of another package
    try:
        from sparkdl.version import __version__
    except Exception:  # noqa: BLE001 (the files may be those of two packages)
        return ""
    return __version__


def _package() -> str:
    """Return the folder from which `import sparkdl` loads; empty if there is none."""
    with suppress(ImportError, ValueError):
        found = util.find_spec("sparkdl")
        if found and found.origin:
            return os.path.dirname(found.origin)
    return ""
