"""Horovod's API over sparkdl's own launcher and collectives: `import sparkdl.horovod.torch as hvd`.

Runs in: child, driver

See docs/horovod.md. https://horovod.readthedocs.io/en/v0.28.1/
"""

from __future__ import annotations

import sys
from typing import Any

from sparkdl.core.namesakes import advise
from sparkdl.horovod.absent import AbsentModules

__all__ = ["run"]

if not any(isinstance(finder, AbsentModules) for finder in sys.meta_path):
    sys.meta_path.append(AbsentModules())


def __getattr__(name: str) -> Any:
    if name == "run":
        from sparkdl.horovod.runner import run

        return run
    advise(f"horovod.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
