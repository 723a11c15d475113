"""Every number and environment variable a user can turn.

Runs in: anywhere
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from sparkdl.core.errors import ConfigError
from sparkdl.core.options import Feeding, Recovery, check_seconds


@dataclass(frozen=True)
class Settings:
    """Limits of one cluster, as they travel to its executors. All times in seconds.

    Attributes:
        start_timeout_s: until all nodes have gathered.
        max_restarts: after failures within `restart_window_s`, before one is final.
        recovery: what follows when something is lost or stands still.
        feeding: how rows come.
        grace_s: between asking a child to end and killing it.
        lease_s: for which the network between driver and an agent may be cut without harm; after
            somewhat more than twice as long the agent ends its child, see `control/lease.py`.
        log_tail_lines: of a failed child that travel with its failure.
        max_port_retries: new rounds on new ports before a lost port counts as a failure.
        keep_warm_s: how long the processes that have imported the framework stay for the next
            launch.
        restart_backoff_s: before the second restart in a row; doubled before each further one.
        restart_window_s: a restart longer ago than this does not count any more.
        settle_s: after a first failure, to wait for others: the one that is reported first need not
            be the one that happened first. Where all are consequences of another node's loss, the
            driver waits `recovery.host_timeout_s` longer.
        stay_s: after the end, for which agents stay: feeders whose rows are refused ask again, to
            learn why.
    """

    start_timeout_s: float = 600.0
    max_restarts: int = 0
    recovery: Recovery = field(default_factory=Recovery)
    feeding: Feeding = field(default_factory=Feeding)
    grace_s: float = 10.0
    lease_s: float = 20.0
    log_tail_lines: int = 40
    max_port_retries: int = 3
    keep_warm_s: float = 0.0
    restart_backoff_s: float = 1.0
    restart_window_s: float = 3600.0
    settle_s: float = 0.3
    stay_s: float = 3.0

    def __post_init__(self) -> None:
        check_seconds("lease_s={}", self.lease_s)
        if not 0 <= self.grace_s < math.inf:
            raise ConfigError(f"grace_s={self.grace_s} must be zero seconds or more, and finite")
        if self.max_restarts < 0:
            raise ConfigError(f"max_restarts={self.max_restarts} must be 0 or more")
        if self.recovery.on_hang == "restart" and not self.max_restarts:
            raise ConfigError("Recovery(on_hang='restart') needs max_restarts=1 or more")


@dataclass(frozen=True)
class Environment:
    """The environment variables that sparkdl reads, TensorFlowOnSpark's names included.

    Attributes:
        driver_host: `SPARKDL_DRIVER_HOST` or `TFOS_SERVER_HOST`: the address under which the
            executors reach the driver.
        driver_ports: `SPARKDL_DRIVER_PORT` or `TFOS_SERVER_PORT`: `0`, one port, or `low-high`.
        node_host: `SPARKDL_NODE_HOST`, on an executor: the address under which the other nodes
            reach it.
        node_port: `TENSORFLOW_PORT`, on an executor: a fixed port for the framework.
        board_port: `TENSORBOARD_PORT`, on an executor: a fixed port for TensorBoard.
        dashboard: `SPARKDL_DASHBOARD`: `0` for no dashboard unless a launch asks for it.
        dashboard_host: `SPARKDL_DASHBOARD_HOST`: the address that it listens at; the driver's.
        dashboard_ports: `SPARKDL_DASHBOARD_PORT`: one port, or `low-high`, of which the first that
            is free is taken, or any.
        dashboard_prefix: `SPARKDL_DASHBOARD_PREFIX`: the path that a reverse proxy has it under.
        hadoop_home: `HADOOP_PREFIX` or `HADOOP_HOME`, on an executor: Hadoop's folder.
        is_pod: whether this is an executor in a pod of Kubernetes (`SPARK_EXECUTOR_POD_IP`).
        is_yarn: whether this is an executor in a container of YARN (`CONTAINER_ID`).
    """

    driver_host: str | None = None
    driver_ports: tuple[int, ...] = (0,)
    node_host: str | None = None
    node_port: int | None = None
    board_port: int = 0
    dashboard: bool = True
    dashboard_host: str | None = None
    dashboard_ports: tuple[int, ...] = tuple(range(8780, 8800))
    dashboard_prefix: str = ""
    hadoop_home: str | None = None
    is_pod: bool = False
    is_yarn: bool = False

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Environment:
        """Read the variables of this process.

        Raises:
            ConfigError: if a port is not a number or a range of numbers.
        """
        env = os.environ if environ is None else environ
        host = env.get("SPARKDL_DRIVER_HOST") or env.get("TFOS_SERVER_HOST") or None
        ports = env.get("SPARKDL_DRIVER_PORT") or env.get("TFOS_SERVER_PORT") or "0"
        node_port = env.get("TENSORFLOW_PORT")
        return cls(
            driver_host=host,
            driver_ports=_ports("SPARKDL_DRIVER_PORT / TFOS_SERVER_PORT", ports),
            node_host=env.get("SPARKDL_NODE_HOST") or None,
            node_port=_ports("TENSORFLOW_PORT", node_port)[0] if node_port else None,
            board_port=_ports("TENSORBOARD_PORT", env.get("TENSORBOARD_PORT") or "0")[0],
            dashboard=env.get("SPARKDL_DASHBOARD", "1") != "0",
            dashboard_host=env.get("SPARKDL_DASHBOARD_HOST") or None,
            dashboard_ports=_ports(
                "SPARKDL_DASHBOARD_PORT", env.get("SPARKDL_DASHBOARD_PORT") or "8780-8799"
            ),
            dashboard_prefix=_prefix(env.get("SPARKDL_DASHBOARD_PREFIX") or ""),
            hadoop_home=env.get("HADOOP_PREFIX") or env.get("HADOOP_HOME") or None,
            is_pod=bool(env.get("SPARK_EXECUTOR_POD_IP")),
            is_yarn=bool(env.get("CONTAINER_ID")),
        )


def visible_gpus(environ: Mapping[str, str] | None = None) -> tuple[str, ...] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES up to an invalid one; `None` if it is not set.

    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables
    """
    text = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    entries = [entry.strip() for entry in text.split(",")]
    return tuple(takewhile(lambda entry: entry not in ("", "-1"), entries))


def _prefix(text: str) -> str:
    parts = text.strip("/")
    return f"/{parts}" if parts else ""


def _ports(name: str, text: str) -> tuple[int, ...]:
    low, _, high = text.partition("-")
    try:
        first, last = int(low), int(high or low)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is neither a port nor a range like 5000-5010") from None
    if not 0 <= first <= last <= 65535:
        raise ConfigError(f"{name}={text!r} is not a range of ports between 0 and 65535")
    return tuple(range(first, last + 1))
