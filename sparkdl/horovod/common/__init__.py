"""The parts that all of Horovod's APIs share: the world, process sets, and reduction operations.

Runs in: child

https://horovod.readthedocs.io/en/v0.28.1/api.html
"""

from __future__ import annotations

from sparkdl.horovod.common import basics
from sparkdl.horovod.common.basics import *  # noqa: F403 (what all faces have)
from sparkdl.horovod.common.basics import op_of
from sparkdl.horovod.common.exceptions import HostsUpdatedInterrupt
from sparkdl.horovod.common.process_sets import (
    get_process_set_ids_and_ranks,
    group_of,
    process_set_by_id,
    process_sets,
)

__all__ = [
    *basics.__all__,
    "HostsUpdatedInterrupt",
    "get_process_set_ids_and_ranks",
    "group_of",
    "op_of",
    "process_set_by_id",
    "process_sets",
]
