"""Horovod's API over sparkdl's own launcher and collectives: `import sparkdl.horovod.torch as hvd`.

Runs in: child

See docs/horovod.md. https://horovod.readthedocs.io/en/v0.28.1/
"""

from __future__ import annotations

from typing import Any

from sparkdl.core.namesakes import missing_name

__all__ = ["log_to_driver", "run"]


def __getattr__(name: str) -> Any:
    if name == "run":
        from sparkdl.horovod.runner import run

        return run
    if name == "log_to_driver":
        from sparkdl.horovod.common.process_sets import log_to_driver

        return log_to_driver
    return missing_name(__name__, name)
