"""TensorFlowOnSpark's `util`: a process's own environment, address and executor id.

Runs in: anywhere

https://github.com/yahoo/TensorFlowOnSpark/blob/v2.2.5/tensorflowonspark/util.py
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparkdl.core.errors import ConfigError
from sparkdl.core.settings import Environment
from sparkdl.node.resources import HadoopClasspath, own_host
from sparkdl.tfos import gpu_info

__all__ = [
    "find_in_path",
    "get_ip_address",
    "read_executor_id",
    "single_node_env",
    "write_executor_id",
]

_EXECUTOR_ID = "executor_id"


def single_node_env(num_gpus: int = 1, worker_index: int = -1, nodes: Sequence[str] = ()) -> None:
    """Prepare this process's environment for one TensorFlow process: CLASSPATH, visible GPUs.

    Args:
        num_gpus: how many GPUs it may see, where there are any.
        worker_index: which of `nodes` this is; negative for any GPUs.
        nodes: addresses of all runs, `host` or `host:port`, to share out the GPUs of each host.

    Raises:
        ConfigError: if there are GPUs, but not so many free ones.
    """
    jars = HadoopClasspath.begin()
    if jars:
        jars.finish()
    gpus: str | list[str] = ""
    if num_gpus > 0 and gpu_info.is_gpu_available():
        gpus = gpu_info.get_gpus(num_gpus, index_on_host(nodes, worker_index))
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpus)


def index_on_host(nodes: Sequence[str], worker_index: int) -> int:
    """Return the order of node `worker_index` among those of the same host.

    Args:
        nodes: addresses, `host` or `host:port`.
        worker_index: where in `nodes` it is; returned as it is where `nodes` does not reach.
    """
    if not 0 <= worker_index < len(nodes):
        return worker_index
    hosts = [_host(node) for node in nodes]
    return hosts[:worker_index].count(hosts[worker_index])


def get_ip_address() -> str:
    """Return this machine's address, as others reach it.

    `SPARKDL_NODE_HOST` overrides it. Without a route to other networks it is that of the host's
    own name.
    """
    with suppress(OSError):
        return own_host(("8.8.8.8", 80), Environment.read())
    with suppress(OSError):
        return socket.gethostbyname(socket.getfqdn())
    return "127.0.0.1"


def find_in_path(path: str, file: str) -> str | bool:
    """Return the first `file` in the folders of `path`, which is like `PATH`, or `False`."""
    for folder in path.split(os.pathsep):
        candidate = Path(folder, file)
        if candidate.is_file():
            return str(candidate)
    return False


def write_executor_id(num: int) -> None:
    """Keep a number in the file `executor_id` of the working directory."""
    Path(_EXECUTOR_ID).write_text(str(num), encoding="utf-8")


def read_executor_id() -> int:
    """Return the number that `write_executor_id` has kept.

    Raises:
        ConfigError: if there is none. Nodes of a cluster have `ctx.executor_id` instead.
    """
    try:
        return int(Path(_EXECUTOR_ID).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"no file {_EXECUTOR_ID!r} in {Path.cwd()}: write_executor_id was not called here. A "
            "node of a cluster has ctx.executor_id instead, wherever its tasks run"
        ) from None


def num_gpus(args: Any) -> int | dict[str, int] | None:
    """Return `num_gpus` of a dict, an argparse namespace or another object; `None` without."""
    value = args.get("num_gpus") if isinstance(args, dict) else getattr(args, "num_gpus", None)
    return value if value is None or isinstance(value, dict) else int(value)


def _host(node: str) -> str:
    """Return the host of `host`, `host:port` or `[host]:port`."""
    if node.startswith("["):
        return node[1:].partition("]")[0]
    return node.partition(":")[0] if node.count(":") == 1 else node
