"""The options of `launch`: `Observe`, all option objects by name, and a type for `**options`.

Type checkers and editors alone read `LaunchOptions`. Its fields are those of `launch`'s signature,
written by `python -m scripts.generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict

from sparkdl.core.errors import ConfigError
from sparkdl.core.options import Feeding, Recovery, Roles, Startup
from sparkdl.driver.events import Report


@dataclass(frozen=True)
class LogLine:
    """A line that a child printed.

    Attributes:
        is_error: whether the child marked it as error output, see `node/error_lines.py`.
    """

    node: str
    text: str
    is_error: bool = False


@dataclass(frozen=True, kw_only=True)
class Observe:
    """Monitoring of the cluster: dashboard, logs, reports.

    Attributes:
        dashboard: whether pages in a browser show it, see `Cluster.dashboard_url`; by default where
            the extra `dashboard` is installed. See docs/observing.md.
        record: folder for a record of the run, which `sparkdl dashboard FOLDER` shows again.
        tensorboard: `True` to run TensorBoard beside the first node, or the directory or URL that
            it shows, by default `tensorboard_<node id>` where `map_fun` runs. The launch returns
            when it answers; `map_fun` runs meanwhile. See `Cluster.tensorboard_url`.
        log_to_driver: print the nodes' output here, each line behind `[worker:1]`: of all nodes
            (`True`) or of none (`False`). The default is rank 0's output on a terminal, in a
            notebook, and where spark-submit runs the program in client mode; elsewhere, and with
            `on_log`, none. Nodes have `TF_CPP_MIN_LOG_LEVEL=1`, unless their environment sets it.
        on_log: called with each line of all nodes, a `LogLine`, on a thread that the cluster needs,
            so it must be quick.
        on_report: called with the nodes' reports (`ctx.report`), a `Report` with `node`, `rank`,
            `step` and `metrics`. It is called a few times a second at most, with the last report
            of those since, on a thread that the cluster needs, so it must be quick. See
            docs/observing.md.
        progress: progress bars; by default where the error stream is a terminal.
    """

    dashboard: bool | None = None
    record: str | None = None
    tensorboard: bool | str = False
    log_to_driver: bool | None = None
    on_log: Callable[[LogLine], None] | None = None
    on_report: Callable[[Report], None] | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        if callable(self.log_to_driver):
            raise ConfigError(
                f"Observe(log_to_driver={self.log_to_driver!r}): must be True or False. Give a "
                "function as on_log="
            )


OBJECTS = {
    "roles": Roles,
    "recovery": Recovery,
    "feeding": Feeding,
    "observe": Observe,
    "startup": Startup,
}
"""The option objects, by the parameter of `launch` that takes each."""


def reads_own_data(feeding: Any) -> Any:
    """Return `feeding` with `fed=False`; return other types as they are, for `launch` to reject."""
    return replace(feeding, fed=False) if isinstance(feeding, Feeding) else feeding


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
