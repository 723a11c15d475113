"""The options of `launch` as types, for the callers that pass them on as `**options`.

Runs in: anywhere

Type checkers and editors alone read them. Their fields are those of `launch`'s signature, written
by `python -m scripts.options`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sparkdl.control.tls import TlsFiles
    from sparkdl.core.settings import HangAction
    from sparkdl.core.spec import InputMode, Placement
    from sparkdl.driver.events import Report
    from sparkdl.driver.logs import LogLine


class LaunchOptions(TypedDict, total=False):
    """The keyword arguments of `sparkdl.launch`."""

    framework: str
    input_mode: str | InputMode
    num_ps: int
    master_node: str | None
    eval_node: bool
    coordinator: bool | None
    driver_ps_nodes: bool
    executor: Literal["spark", "local"]
    placement: Placement
    num_gpus: int | Mapping[str, int] | None
    release_port: bool
    tensorboard: bool | str
    log_to_driver: bool | Callable[[LogLine], None] | None
    log_dir: str | None
    show_progress: bool | None
    reservation_timeout: float
    feed_timeout: float
    feed_memory: int | None
    feed_disk: int | None
    max_restarts: int
    keep_warm_s: float | None
    preload: Sequence[str]
    min_nodes: int | None
    elastic_timeout: float
    host_timeout: float
    checkpoint_dir: str | None
    keep_checkpoints: int
    hang_timeout: float | None
    hang_action: HangAction
    independent_models: bool
    on_report: Callable[[Report], None] | None
    tls: bool | tuple[str, str, str] | TlsFiles | None
    dashboard: bool | None
    record: str | None
    timeline: str | None
