"""What a node does for `horovod.spark.run`: calls the user's function, and packs its result.

Runs in: child, driver
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from sparkdl.core.settings import visible_gpus
from sparkdl.node.context import NodeContext


@dataclass(frozen=True)
class Task:
    """The user's function with its arguments, as `map_fun`.

    Attributes:
        env: variables to set before it is called.
    """

    fn: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, args: None, ctx: NodeContext) -> bytes:
        """Call it; return its result, pickled by value."""
        os.environ.update(self.env)
        packed: bytes = cloudpickle.dumps(self.fn(*self.args, **self.kwargs))
        return packed


def get_available_devices() -> list[str]:
    """Return the numbers of the GPUs that this process was given, by which frameworks know them.

    Inside a process these count from 0, for it sees no others.
    """
    return [str(number) for number, _ in enumerate(visible_gpus() or ())]


def unpacked(packed: bytes) -> Any:
    """Return a result of the user's own function, which came over the cluster's connections."""
    return cloudpickle.loads(packed)
