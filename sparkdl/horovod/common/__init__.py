"""The parts that all of Horovod's APIs share: the world, process sets, and reduction operations.

Runs in: child

https://horovod.readthedocs.io/en/v0.28.1/api.html
"""

from __future__ import annotations

from sparkdl.horovod.common import basics
from sparkdl.horovod.common.basics import *  # noqa: F403 (what all faces have)
from sparkdl.horovod.common.basics import op_of
from sparkdl.horovod.common.process_sets import group_of

__all__ = [*basics.__all__, "group_of", "op_of"]
