"""Every number and environment variable a user can turn."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import takewhile
from typing import Any

from sparkdl.core.errors import ConfigError
from sparkdl.core.options import Feeding, Recovery


@dataclass(frozen=True)
class Settings:
    """Limits of one cluster, as they travel to its executors. All times in seconds.

    Attributes:
        start_timeout_s: until all nodes have gathered.
        max_restarts: after failures within `restart_window_s`, before one is final.
        recovery: what follows when something is lost or hangs.
        feeding: how rows come.
        grace_s: between asking a child to end and killing it.
        lease_s: for which driver or agent may be frozen without harm; after somewhat more the
            agent ends its child, see `control/lease.py`.
        max_port_retries: new rounds on new ports before a lost port counts as a failure.
        restart_window_s: a restart longer ago than this does not count any more.
        settle_s: wait after a first failure for others, because the first reported failure need not
            be the first that happened. Where all are consequences of another node's loss, the
            driver waits `recovery.host_timeout_s` longer.
        stay_s: how long agents outlive the cluster, so that refused feeders can ask for the reason.
    """

    start_timeout_s: float = 600.0
    max_restarts: int = 0
    recovery: Recovery = field(default_factory=Recovery)
    feeding: Feeding = field(default_factory=Feeding)
    grace_s: float = 10.0
    lease_s: float = 20.0
    max_port_retries: int = 3
    restart_window_s: float = 3600.0
    settle_s: float = 0.3
    stay_s: float = 3.0

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ConfigError(f"max_restarts={self.max_restarts} must be 0 or more")

    @property
    def can_restart(self) -> bool:
        return self.max_restarts > 0


def _ports(name: str, text: str) -> tuple[int, ...]:
    low, _, high = text.partition("-")
    try:
        first, last = int(low), int(high or low)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is neither a port nor a range like 5000-5010") from None
    if not 0 <= first <= last <= 65535:
        raise ConfigError(
            f"{name}={text!r} is not a range of ports, which must be between 0 and 65535"
        )
    return tuple(range(first, last + 1))


def _port(name: str, text: str) -> int | None:
    return _ports(name, text)[0] if text else None


def _text(name: str, text: str) -> str | None:
    return text or None


def _prefix(name: str, text: str) -> str:
    parts = text.strip("/")
    return f"/{parts}" if parts else ""


def _variable(parse: Callable[[str, str], Any], *names: str, unset: str = "") -> Any:
    """Return a field of `Environment`.

    Args:
        parse: takes the names, for errors, and the text.
        names: names of variables; the first non-empty one counts.
        unset: the text where none of them is.
    """

    def read(environ: Mapping[str, str]) -> Any:
        return parse(" / ".join(names), next(filter(None, map(environ.get, names)), unset))

    # `Environment()` ignores all variables, as a launch on this machine alone needs.
    return field(default_factory=partial(read, {}), metadata={"read": read})


@dataclass(frozen=True)
class Environment:
    """The environment variables that sparkdl reads, TensorFlowOnSpark's names included."""

    driver_host: str | None = _variable(_text, "SPARKDL_DRIVER_HOST", "TFOS_SERVER_HOST")
    """The address under which the executors reach the driver."""
    driver_ports: tuple[int, ...] = _variable(
        _ports, "SPARKDL_DRIVER_PORT", "TFOS_SERVER_PORT", unset="0"
    )
    """`0`, one port, or `low-high`."""
    node_host: str | None = _variable(_text, "SPARKDL_NODE_HOST")
    """On an executor: the address under which the other nodes reach it."""
    node_port: int | None = _variable(_port, "TENSORFLOW_PORT")
    """On an executor: a fixed port for the framework."""
    board_port: int = _variable(_port, "TENSORBOARD_PORT", unset="0")
    """On an executor: a fixed port for TensorBoard."""
    dashboard: bool = _variable(lambda _, text: text != "0", "SPARKDL_DASHBOARD")
    """`0` for no dashboard unless a launch asks for it."""
    dashboard_host: str | None = _variable(_text, "SPARKDL_DASHBOARD_HOST")
    """The address that it listens at; the driver's."""
    dashboard_ports: tuple[int, ...] = _variable(
        _ports, "SPARKDL_DASHBOARD_PORT", unset="8780-8799"
    )
    """One port, or a range `low-high`: its first free port, or else any port."""
    dashboard_prefix: str = _variable(_prefix, "SPARKDL_DASHBOARD_PREFIX")
    """The path that a reverse proxy has it under."""
    hadoop_home: str | None = _variable(_text, "HADOOP_PREFIX", "HADOOP_HOME")
    """On an executor: Hadoop's folder."""
    is_pod: bool = _variable(lambda _, text: bool(text), "SPARK_EXECUTOR_POD_IP")
    """Whether this is an executor in a pod of Kubernetes."""
    is_yarn: bool = _variable(lambda _, text: bool(text), "CONTAINER_ID")
    """Whether this is an executor in a container of YARN."""

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Environment:
        return cls(**{each.name: each.metadata["read"](environ) for each in fields(cls)})


def visible_gpus(environ: Mapping[str, str] | None = None) -> tuple[str, ...] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES up to an invalid one; `None` if it is not set.

    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables
    """
    text = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    entries = [entry.strip() for entry in text.split(",")]
    return tuple(takewhile(lambda entry: entry not in ("", "-1"), entries))


PRELOADED = "SPARKDL_PRELOAD"
"""In a fork server: JSON of the agent's process id, the framework and the names of modules."""
EXECUTORS_GPUS = "SPARKDL_EXECUTORS_GPUS"
"""In a Python worker whose CUDA_VISIBLE_DEVICES sparkdl has set: the executor's, or `ALL_GPUS`."""
ALL_GPUS = "all"


def executors_gpus(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return `visible_gpus` of the executor, also where its Python worker has another share."""
    own = environ.get(EXECUTORS_GPUS)
    if own == ALL_GPUS:
        return None
    return visible_gpus(environ if own is None else {"CUDA_VISIBLE_DEVICES": own})
