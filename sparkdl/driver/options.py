"""The options of `launch` as types, for the callers that pass them on as `**options`.

Runs in: anywhere

Type checkers and editors alone read them. Their fields are those of `launch`'s signature, written
by `python -m scripts.options`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sparkdl.core.options import Feeding, Observe, Recovery, Roles, Startup


class LaunchOptions(TypedDict, total=False):
    """The keyword arguments of `sparkdl.launch`."""

    framework: str
    num_gpus: int | Mapping[str, int] | None
    max_restarts: int
    checkpoint_dir: str | None
    executor: Literal["spark", "local"]
    roles: Roles
    recovery: Recovery
    feeding: Feeding
    observe: Observe
    startup: Startup
