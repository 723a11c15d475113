"""Horovod's API over sparkdl's own launcher and collectives: `import sparkdl.horovod.torch as hvd`.

Runs in: child, driver

See docs/horovod.md. https://horovod.readthedocs.io/en/v0.28.1/
"""

from __future__ import annotations

from typing import Any

from sparkdl.horovod.absent import tell_absent

__all__ = ["run"]

tell_absent()


def __getattr__(name: str) -> Any:
    if name == "run":
        from sparkdl.horovod.runner import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
