"""TensorFlowOnSpark's `util`: a process's own environment and address.

https://github.com/yahoo/TensorFlowOnSpark/blob/v2.2.5/tensorflowonspark/util.py
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from sparkdl.core.settings import Environment
from sparkdl.node.resources import HadoopClasspath, own_host
from sparkdl.tfos import gpu_info

__all__ = ["get_ip_address", "single_node_env"]


def single_node_env(num_gpus: int = 1, worker_index: int = -1, nodes: Sequence[str] = ()) -> None:
    """Prepare this process's environment for one TensorFlow process: CLASSPATH, visible GPUs.

    Args:
        num_gpus: how many GPUs it may see, where there are any.
        worker_index: which of `nodes` this is; negative for any GPUs.
        nodes: addresses of all runs, `host:port`, to share out the GPUs of each host.

    Raises:
        ConfigError: if there are GPUs, but too few are free.
    """
    jars = HadoopClasspath.begin()
    if jars:
        jars.finish()
    gpus: str | list[str] = ""
    if num_gpus > 0 and gpu_info.is_gpu_available():
        gpus = gpu_info.get_gpus(num_gpus, index_on_host(nodes, worker_index))
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpus)


def index_on_host(nodes: Sequence[str], worker_index: int) -> int:
    """Return the order of node `worker_index` among the `nodes`, `host:port`, of the same host."""
    if not 0 <= worker_index < len(nodes):
        return worker_index
    hosts = [node.rpartition(":")[0] or node for node in nodes]
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


def num_gpus(args: Any) -> int | dict[str, int] | None:
    """Return `num_gpus` of a dict, an argparse namespace or another object; `None` without."""
    value = args.get("num_gpus") if isinstance(args, dict) else getattr(args, "num_gpus", None)
    return value if value is None or isinstance(value, dict) else int(value)
