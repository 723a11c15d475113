"""The options of a launch besides its function, its size and its framework.

They are grouped into objects by topic; `Observe`, for the driver alone, is in `driver/options.py`.
Each option is declared once: `launch`, `run`, `search` and the estimators take the objects as they
are, and `Settings` carries them to the executors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from sparkdl.core.errors import ConfigError

MIN_HOST_TIMEOUT_S = 4.0
HangAction = Literal["report", "fail"]
Placement = Literal["auto", "attached", "detached"]


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The roles of the nodes.

    Attributes:
        ps: how many of the nodes are parameter servers.
        chief: name of the chief's role, `chief` or TensorFlow 1's `master`, if one of the nodes is
            to be a chief.
        evaluator: whether one of the nodes is an evaluator.
        coordinator: whether only the chief runs `map_fun`, on servers that ps and workers run,
            see docs/tensorflow.md; by default with TensorFlow and `ps`. `False` runs
            `map_fun` on all nodes.
        ps_on_driver: run the parameter servers on the driver's machine, without slots of Spark.
        independent_models: whether nodes may train without exchanging anything: each trains a
            separate model on its share of the rows. Otherwise `fit` of Keras outside of a strategy
            is an error, and other loops log a warning.

    Raises:
        ConfigError: if the number of parameter servers is negative.
    """

    ps: int = 0
    chief: str | None = None
    evaluator: bool = False
    coordinator: bool | None = None
    ps_on_driver: bool = False
    independent_models: bool = False

    def __post_init__(self) -> None:
        if self.ps < 0:
            raise ConfigError(f"Roles(ps={self.ps}) must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """How the cluster reacts to losses and hangs. Times in seconds.

    Attributes:
        min_nodes: continue with at least this many if lost ones do not come back; by default all.
        wait_s: how long a restart waits for lost nodes.
        host_timeout_s: seconds without an answer of its kernel after which a host counts as lost. A
            network outage longer than half of this may cost a restart.
        hang_timeout_s: seconds without step, row or exit until stacks are logged; `None`: never.
        on_hang: what to do after that: `report`: nothing more; `fail`: treat the nodes that hang as
            failed, so that all nodes restart as after any failure.
        keep_checkpoints: how many of the newest are kept in `checkpoint_dir`.

    Raises:
        ConfigError: if a value is invalid.
    """

    min_nodes: int | None = None
    wait_s: float = 60.0
    host_timeout_s: float = 8.0
    hang_timeout_s: float | None = 600.0
    on_hang: HangAction = "report"
    keep_checkpoints: int = 3

    def __post_init__(self) -> None:
        check_seconds("Recovery(wait_s={})", self.wait_s)
        if not MIN_HOST_TIMEOUT_S <= self.host_timeout_s < math.inf:
            raise ConfigError(
                f"Recovery(host_timeout_s={self.host_timeout_s}) must be at least "
                f"{MIN_HOST_TIMEOUT_S:g} seconds, and finite: each host is probed once a second"
            )
        if self.min_nodes is not None and self.min_nodes < 1:
            raise ConfigError(
                f"Recovery(min_nodes={self.min_nodes}) must be 1 or more, or None for all"
            )
        if self.keep_checkpoints < 1:
            raise ConfigError(
                f"Recovery(keep_checkpoints={self.keep_checkpoints}) must be 1 or more"
            )
        if self.hang_timeout_s is not None and not 0 < self.hang_timeout_s < math.inf:
            raise ConfigError(
                f"Recovery(hang_timeout_s={self.hang_timeout_s}) must be above zero seconds and "
                "finite, or None"
            )
        if self.on_hang not in get_args(HangAction):
            raise ConfigError(
                f"Recovery(on_hang={self.on_hang!r}): choose {', '.join(get_args(HangAction))}"
            )


@dataclass(frozen=True, kw_only=True)
class Feeding:
    """How rows come to the nodes.

    Attributes:
        fed: whether `cluster.feed` and `infer` send them; `False` where `map_fun` reads its own
            data, as with `sparkdl.run`.
        timeout_s: fail when no row has been sent or read for this many seconds. A node that waits
            for the first row of a feed uses the same limit.
        memory_nbytes: bytes of rows that a node holds before feeders wait, or it reads no further;
            by default an eighth of the memory.
        disk_nbytes: bytes of local disk on its executor for further rows, if later epochs read them
            again or a fixed order has them wait; by default a quarter of the free space.
        global_batch_size: rows of one step of all nodes together, in a fixed order: a step has the
            same rows on any number of nodes, and after any restart. By default each node takes
            batches of what comes first. See docs/guide.md.

    Raises:
        ConfigError: if a value is invalid.
    """

    fed: bool = True
    timeout_s: float = 600.0
    memory_nbytes: int | None = None
    disk_nbytes: int | None = None
    global_batch_size: int | None = None

    def __post_init__(self) -> None:
        check_seconds("Feeding(timeout_s={})", self.timeout_s)
        if self.memory_nbytes is not None and self.memory_nbytes < 1:
            raise ConfigError(
                f"Feeding(memory_nbytes={self.memory_nbytes}) must be at least one byte"
            )
        if self.disk_nbytes is not None and self.disk_nbytes < 0:
            raise ConfigError(f"Feeding(disk_nbytes={self.disk_nbytes}) must be zero bytes or more")
        if (rows := self.global_batch_size) is not None and (rows < 1 or not self.fed):
            raise ConfigError(
                f"Feeding(global_batch_size={rows}) must be at least 1, and leave out fed=False"
            )


@dataclass(frozen=True, kw_only=True)
class Startup:
    """Where and how nodes start.

    Attributes:
        timeout_s: seconds within which all nodes must start. Before that a launch waits up to as
            many seconds for executors, and while other launches of this program start their nodes.
        placement: `attached`: nodes keep their task slots. `detached`: they give them back to
            feeding tasks. `auto`: detached where Spark feeds them without dynamic allocation.
        preload: modules that nodes import while they wait for one another; `["transformers"]`.
        release_port: `False` to keep the framework's port reserved until `ctx.release_port()`.
        tls: whether the connections of sparkdl are encrypted, with a certificate that is made for
            this cluster. By default where Spark encrypts its own. See docs/security.md.

    Raises:
        ConfigError: if a value is invalid.
    """

    timeout_s: float = 600.0
    placement: Placement = "auto"
    preload: Sequence[str] = ()
    release_port: bool = True
    tls: bool | None = None

    def __post_init__(self) -> None:
        check_seconds("Startup(timeout_s={})", self.timeout_s)
        if self.placement not in get_args(Placement):
            raise ConfigError(
                f"Startup(placement={self.placement!r}): choose 'auto', 'attached' or 'detached'"
            )
        if self.tls is not None and not isinstance(self.tls, bool):
            raise ConfigError(f"Startup(tls={self.tls!r}): give True or False")
        # A single text is iterable, too: each of its letters would be taken for a module.
        names = (self.preload,) if isinstance(self.preload, str) else self.preload
        if not isinstance(names, Iterable):
            raise ConfigError(
                f"Startup(preload={names!r}): give names of modules, like ['transformers']"
            )
        # A frozen dataclass can complete its own fields only in this way.
        object.__setattr__(self, "preload", tuple(names))
        for name in self.preload:
            if not (isinstance(name, str) and all(map(str.isidentifier, name.split(".")))):
                raise ConfigError(
                    f"Startup(preload={list(self.preload)}): {name!r} is no name of a module; give "
                    "names as in an import, like ['transformers', 'scipy.stats']"
                )


def check_seconds(setting: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{setting.format(value)} must be above zero seconds, and finite")
