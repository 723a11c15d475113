"""The node's part of `horovod.spark.run`: call the user's function, and pack its result.

Runs in: child, driver
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sparkdl.core.namesakes import missing_name
from sparkdl.core.settings import visible_gpus
from sparkdl.horovod.common.process_sets import HostPlacement
from sparkdl.node.context import NodeContext
from sparkdl.node.error_lines import mark_error_lines
from sparkdl.torch_program import packed

__path__: list[str] = []
"""Makes this a package, as Horovod's is, so that imports of its modules raise advice."""
__getattr__ = partial(missing_name, __name__)


@dataclass(frozen=True)
class Task:
    """The user's function with its arguments, as `map_fun`.

    Attributes:
        folder: on this machine, for results of any size; `None` where processes are elsewhere.
    """

    fn: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    marks_errors: bool = False
    folder: str | None = None

    def __call__(self, args: None, ctx: NodeContext) -> Any:
        os.environ.update(self.env)
        if ctx.member.role.is_trainer:
            # Programs read these before they call `hvd.init`, as Horovod's launcher sets them.
            os.environ.update(HostPlacement.of(ctx).variables)
        if self.marks_errors:
            mark_error_lines()
        return packed(self.fn(*self.args, **self.kwargs), self.folder)


def get_available_devices() -> list[str]:
    """Return the numbers of this process's GPUs, as frameworks count them.

    Inside a process the numbers begin at 0, because it sees no other GPUs.
    """
    return [str(number) for number, _ in enumerate(visible_gpus() or ())]
